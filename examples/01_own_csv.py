# %% [markdown]
# # From my CSV file to a trained federation
#
# Three hospitals want one model that tells malignant from benign tumours. Their patients are in a CSV file: one row for
# each patient, a column with the diagnosis, and a column with the hospital.
#
# We write such a file from the breast cancer data that come with scikit-learn: 569 patients, 30 measurements each. The
# hospitals differ, as real ones do: most patients of the clinic in the north have a malignant tumour, most in the south
# a benign one.

# %%
import csv

import numpy as np
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer()
chance = {"malignant": [0.7, 0.1, 0.2], "benign": [0.1, 0.6, 0.3]}  # of north, south and east
random = np.random.default_rng(0)

with open("patients.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["patient", "hospital", *data.feature_names, "diagnosis"])
    for number, (measurements, target) in enumerate(zip(data.data, data.target, strict=True)):
        diagnosis = data.target_names[target]
        hospital = random.choice(["north", "south", "east"], p=chance[diagnosis])
        writer.writerow([number, hospital, *measurements, diagnosis])

# %% [markdown]
# ## Say what the columns are
#
# `label` is the column to predict. `client` is the column that says whose row it is. `drop` leaves columns out: the
# patient's number says nothing about the tumour, and no program can tell it from a measurement.
#
# The other columns are the inputs. Numbers are normalised by the mean and deviation of the training examples; texts
# would become one input for each category.

# %%
import fedrane
from fedrane import Experiment

experiment = Experiment(
    dataset="patients.csv", label="diagnosis", client="hospital", drop="patient", rounds=10, epochs=2, batch=16, lr=0.05
)

# %% [markdown]
# A misspelt column is an error that names the right one:

# %%
try:
    fedrane.run(experiment.replace(label="diagnose"))
except fedrane.FedraneError as error:
    print(str(error)[:150])

# %% [markdown]
# ## Train
#
# A fifth of each class is held out as the official test set, always the same rows. A quarter of each hospital's other
# rows is its local test set. `out` is a folder, from which the run can be resumed and its models loaded.
#
# On the command line this is `fedrane run dataset=patients.csv label=diagnosis client=hospital drop=patient rounds=10
# epochs=2 batch=16 lr=0.05`.

# %%
result = fedrane.run(experiment, "runs/fedavg")
for client, counts in enumerate(result.labels):
    print("hospital", client, "trains on", dict(zip(result.inputs.classes, counts.tolist(), strict=True)))
for record in result.history[::3]:
    print(f"round {record['round']}: {record['global/accuracy']:.1%} of the test set")

# %% [markdown]
# Hospitals are numbered in the order of their names: 0 is east, 1 is north, 2 is south.
#
# ## Is the federation worth it?
#
# Each hospital could train alone. The fair comparison is on the same examples: the clients' local test sets, with the
# same partition, seed and number of steps. `fedrane` (the method that this library is named after) gives each hospital
# a personal model as well.

# %%
rows = {"fedavg": result}
for method in ("local", "fedrane"):
    rows[method] = fedrane.run(experiment.replace(method=method))

for method, done in rows.items():
    last = done.summary.get("personal/last")
    name, values = ("personal", last) if last else ("global", done.summary["global/last"])
    accuracy = values["personal/accuracy"] if last else values["global/local_accuracy"]
    print(f"{method:8} {accuracy:.1%} on the hospitals' own test examples ({name} model)")

# %% [markdown]
# These tumours are easy to tell apart, so a hospital alone is nearly as good. The fewer rows a client has and the
# harder the task, the more a federation gives. The test sets are small: one patient is about one percent. For a
# comparison that you publish, run several seeds: `fedrane compare --methods fedavg,local,fedrane --seeds 5
# dataset=patients.csv …`.
#
# ## Predict
#
# New patients come in a file with the same columns. Their order does not matter, and the label, the hospital and the
# patient's number may be left out. On the command line: `fedrane predict runs/fedavg new.csv`.

# %%
with open("new.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(reversed(data.feature_names))
    writer.writerows(reversed(list(row)) for row in data.data[:3])

models = fedrane.load("runs/fedavg")
predicted = models.model.predict("new.csv")
probabilities = models.model.predict_proba("new.csv")
for diagnosis, row in zip(predicted, probabilities, strict=True):
    print(f"{diagnosis} with probability {row.max():.2f}")

# %% [markdown]
# A data frame works as well, here and in `fedrane.run(experiment, dataset=frame)`.
#
# ## Missing values
#
# If cells are empty, the run stops and counts them for each column. `impute="median"` replaces them, in training and
# later, by the median of the training examples:

# %%
with open("patients.csv") as file:
    lines = file.read().splitlines()
cells = lines[5].split(",")
cells[2] = ""  # the mean radius of one patient
lines[5] = ",".join(cells)
with open("holes.csv", "w") as file:
    file.write("\n".join(lines))

with_holes = experiment.replace(dataset="holes.csv", rounds=2)
try:
    fedrane.run(with_holes)
except fedrane.FedraneError as error:
    print(error)
imputed = fedrane.run(with_holes.replace(impute="median"))
print(f"with the median: {imputed.summary['global/last']['global/accuracy']:.1%} after two rounds")
