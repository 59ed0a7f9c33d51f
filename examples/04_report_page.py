# %% [markdown]
# # Reading the report page
#
# Every comparison ends in one HTML file that you can mail, print or open on a phone. This tutorial makes one and says
# what to look at. It needs `pip install 'fedrane[report]'`.
#
# ## Make it
#
# Three methods, on digits, with ten clients that have very different digits (α = 0.1). On the command line: `fedrane
# compare --methods fedavg,local,fedrane model=mlp clients=10 rounds=6 partition.alpha=0.1 --out runs/page`.

# %%
import fedrane
from fedrane import Experiment, Partitioning, report

experiment = Experiment(
    dataset="digits", model="mlp", clients=10, rounds=6, epochs=2, batch=32, partition=Partitioning(alpha=0.1)
)
results = {}
for method in ("fedavg", "local", "fedrane"):
    results[method] = fedrane.run(experiment.replace(method=method), f"runs/page/{method}")

page = report.write(["runs/page"], "page.html", samples=0)  # samples: of the t-SNE, which takes longer
print(page, "has", "more" if page.stat().st_size > 1_000_000 else "less", "than a megabyte, and needs no network")

# %% [markdown]
# ## The table of results
#
# Two columns are easily confused:
#
# - `global/accuracy` is the one global model on the official test set;
# - `personal/accuracy` is every client's own model on its own local test set. With α = 0.1 a client has few classes, so
#   even a model that knows nothing else is often right. `local`, which never communicates, shows how far that goes.
#
# A dash means that a method has no such model. Quote the last round, not the best one: the best was chosen on the test
# set.

# %%
for method, result in results.items():
    for model in ("global", "personal"):
        last = result.summary.get(f"{model}/last")
        print(f"{method:8} {model:9}", f"{last[f'{model}/accuracy']:.1%}" if last else "–")

# %% [markdown]
# ## The curves
#
# A curve that rises and falls from round to round says that clients pull the model in different directions. All methods
# saw the same cohorts and batches, so a difference between two curves is one between two methods. With several seeds,
# the band is one standard deviation. FedRANE's last value comes after the last round: its post-training stage,
# calibration.

# %%
for method in ("fedavg", "fedrane"):
    curve = [f"{record['global/accuracy']:.0%}" for record in results[method].history]
    print(f"{method:8}", " ".join(curve))

# %% [markdown]
# ## The clients
#
# The mean hides the client for which a method does not work. Look at the worst tenth, and at the clients that no method
# serves: they often have few examples, which is in the partition's plot below.

# %%
last = results["fedrane"].summary["personal/last"]
print(f"mean over clients {last['personal/accuracy_mean']:.1%}, worst tenth {last['personal/accuracy_worst10']:.1%}")

# %% [markdown]
# ## The cosines
#
# One row for each client, one column for each round: the cosine between the server's step and the client's. Near 1, the
# step serves the client; near or below 0, the round went without or against it. FedRANE chooses its weights so that
# every client gains from the step; its panel of weights shows what that took.

# %%
for method in ("fedavg", "fedrane"):
    cosines = [value for value in results[method].history[experiment.rounds - 1]["cosine"] if value is not None]
    print(f"{method:8} smallest cosine in the last round: {min(cosines):.2f}")

# %% [markdown]
# ## The rest of the page
#
# - **Cost**: bytes and seconds until an accuracy was reached. `--target 0.9` chooses the accuracy. Seconds compare
#   methods only if all ran on one idle machine.
# - **Features** (t-SNE): the classes as the global model separates them. It shows a tendency, no measurement.
# - **Partition**: which client has how many examples of which class.
# - **Configuration**: every setting, first those in which the runs differ. Read it before you believe a difference.
#
# Figures for a paper: `fedrane report runs/page -o page.html --figures figures`. The numbers are in each run's
# `metrics.jsonl` and `summary.json`.
