# %% [markdown]
# # My own method in ten lines
#
# A method says what the server keeps, what a client keeps, what is sent, and what one local step does. It derives from
# `Algorithm`, whose defaults are FedAvg, and changes what is different.
#
# FedProx ([Li et al. 2020](https://arxiv.org/abs/1812.06127)) changes one thing: a client's loss gets a term that pulls
# its model towards the server's, strength / 2 · ‖θ − θ_server‖². This is the whole method, in a file:

# %%
from pathlib import Path

METHOD = """
from dataclasses import dataclass

from fedrane.algorithm import Algorithm


@dataclass(frozen=True)
class Prox(Algorithm):
    strength: float = 0.01

    def objective(self, task, ctx, model, batch):
        loss, outcome = super().objective(task, ctx, model, batch)
        away = [(model.params[name] - sent).square().sum() for name, sent in ctx.down.model.params.items()]
        return loss + self.strength / 2 * sum(away), outcome
"""
Path("prox.py").write_text(METHOD)

# %% [markdown]
# `ctx.down` is what the server has sent. `model.params` are the parameters at this step, by name. Fields of the class
# are the method's settings: `method.strength=0.1` on the command line.
#
# ## Run it
#
# The name of a method of your own is `file.py:Class`, everywhere where a method's name is expected.

# %%
import fedrane
from fedrane import Experiment, Partitioning

experiment = Experiment(
    method="prox.py:Prox",
    dataset="digits",
    model="mlp",
    clients=10,
    rounds=5,
    epochs=2,
    batch=32,
    partition=Partitioning(alpha=0.5),
)
result = fedrane.run(experiment, "runs/prox")
print(f"{result.summary['global/last']['global/accuracy']:.1%} of the test set after {result.round} rounds")

# %% [markdown]
# ## Check its laws
#
# A law is a property that holds for all numbers: the same seed gives the same bytes, the order of clients does not
# matter, padding changes nothing, a checkpoint loses nothing. `fedrane check prox.py:Prox` tests all of them on the
# method. From Python:

# %%
from fedrane import methods
from fedrane.testing import conformance

Prox = methods.find("prox.py:Prox").cls
verdicts = list(conformance.verdicts(Prox()))
held = [verdict for verdict in verdicts if not verdict.problem]
print(f"{len(held)} of {len(verdicts)} laws hold")

# %% [markdown]
# What the laws are good for: here is the same method with a mistake that is easy to make. It pulls *all* parameters
# towards the server's. But with `norm=local`, normalisation layers stay with the client and are not sent.

# %%
wrong = METHOD.replace("model.params[name] - sent", "mine - ctx.down.model.params[name]")
wrong = wrong.replace("for name, sent in ctx.down.model.params.items()", "for name, mine in model.params.items()")
Path("wrong.py").write_text(wrong)
Wrong = methods.find("wrong.py:Prox").cls
for verdict in conformance.verdicts(Wrong()):
    if verdict.problem and not verdict.again:
        print(f"{conformance.title(verdict.law)}: {verdict.problem[:110]}")

# %% [markdown]
# Your own law says what is special about your method. With strength 0, ours is FedAvg, bit for bit:

# %%
from fedrane import tree
from fedrane.methods.fedavg import FedAvg

without = conformance.trained(Prox(strength=0.0)).server
plain = conformance.trained(FedAvg()).server
print("strength 0 is FedAvg:", tree.equal(without, plain))

# %% [markdown]
# ## Compare it
#
# All methods get the same partition, cohorts, batches and seeds. On the command line this is one table, and a report
# page:
#
# `fedrane compare --methods fedavg,weak=prox.py:Prox,strong=prox.py:Prox strong.strength=1 --seeds 3 clients=10`

# %%
import statistics


def accuracies(method):
    runs = [fedrane.run(experiment.replace(method=method, seed=seed), calibrate=False) for seed in (0, 1)]
    return [run.summary["global/last"]["global/accuracy"] for run in runs]


table = {name: accuracies(method) for name, method in {"fedavg": "fedavg", "prox 0.1": Prox(0.1)}.items()}
for name, values in table.items():
    print(f"{name:8} {statistics.fmean(values):.1%} (seeds: {', '.join(f'{value:.1%}' for value in values)})")

# %% [markdown]
# Two seeds and five rounds decide nothing: more rounds, and a strength tuned on validation examples (`fedrane tune
# prox.py:Prox`), come next. How to add a method to the library, and every hook in the order of a round: CONTRIBUTING.md
# and docs/protocol.md.
