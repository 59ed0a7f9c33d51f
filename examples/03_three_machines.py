# %% [markdown]
# # From one laptop to three machines
#
# The experiment that ran on your laptop runs in a real federation too, with [Flower](https://flower.ai): the server
# aggregates, and each client trains on examples that never leave its machine. The method, the settings and the result
# are the same. This needs `pip install 'fedrane[flower]'`.
#
# ## On the laptop
#
# As in the first tutorial, three hospitals have patients. Here each has its own CSV file, and the server has a small
# public sample with the same columns.

# %%
import csv

import numpy as np
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer()
owners = np.random.default_rng(0).choice(["sample", "north", "south", "east"], len(data.target), p=[0.1, 0.4, 0.3, 0.2])


def write(path, rows, more=()):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "diagnosis", *(["hospital"] if len(more) else [])])
        for number in rows:
            writer.writerow([*data.data[number], data.target_names[data.target[number]], *more[number : number + 1]])


for owner in ("sample", "north", "south", "east"):
    write(f"{owner}.csv", np.flatnonzero(owners == owner))
write("all.csv", np.flatnonzero(owners != "sample"), owners)  # what nobody could have in reality

# %%
import fedrane
from fedrane import Experiment

settings = dict(method="fedrane", label="diagnosis", rounds=3, epochs=1, batch=32, lr=0.05, device="cpu", threads=1)
laptop = fedrane.run(Experiment(dataset="all.csv", client="hospital", engine="sequential", **settings))
print(f"on the laptop: {laptop.summary['global/last']['global/accuracy']:.1%} of the test set")

# %% [markdown]
# ## In a simulated federation
#
# `engine=flower` runs the messages and the client code of a real federation in Flower's simulation, on one machine: a
# method that works here works there. The models are the same, bit for bit.

# %%
from fedrane import tree

simulated = fedrane.run(Experiment(dataset="all.csv", client="hospital", engine="flower", **settings))
same = tree.equal(simulated.server, laptop.server)
print("the server's state is the same as on the laptop:", same)

# %% [markdown]
# ## An app for the machines
#
# `fedrane flower new` writes an ordinary Flower app. It looks at the sample for the form of the inputs only: the names
# of the columns, categories, classes, mean and deviation. A node's file may have the columns in any order; a missing
# column is an error on that node that names it.

# %%
import subprocess
import sys


def command(*words):
    print("$ fedrane", *words)
    done = subprocess.run([sys.executable, "-m", "fedrane", *words], capture_output=True, text=True)
    print(done.stdout + done.stderr)


words = [f"{key}={value}" for key, value in settings.items()]
command("flower", "new", "hospitals", "dataset=sample.csv", "clients=3", "partition.minimum=5", *words)

# %%
import json
from pathlib import Path

form = json.loads(Path("hospitals/app_hospitals/inputs.json").read_text())
print("classes:", form["classes"])
print("columns:", [column["name"] for column in form["table"]["columns"]][:4], "…")

# %% [markdown]
# ## TLS and keys
#
# The server proves who it is by a certificate, and everything that is sent is encrypted. Each node proves who it is by
# its own key. For a trial, one command makes all of them:

# %%
command("flower", "certs", "certs", "--nodes", "3", "--host", "127.0.0.1")
print(sorted(path.name for path in Path("certs").iterdir()))

# %% [markdown]
# In production, the certificate comes from your organisation's CA, and each hospital makes its own key and sends only
# the public part.
#
# ## Start it
#
# Four programs run now, each on its own machine, or in its own terminal for a trial:
#
# 1. the server starts Flower's SuperLink with `certs/ca.crt`, `server.pem` and `server.key`;
# 2. the server registers the public key of each node;
# 3. each hospital starts a SuperNode with its own file: `--node-config 'partition-id=0 data="north.csv" …'`;
# 4. the server starts the run: `flwr run hospitals`.
#
# The exact commands are in docs/deploy.md, under "Three nodes on one machine". They are run by this project's tests as
# they stand there, with real processes and TLS. At the end, each hospital has the global model and its personal model
# in its own folder, and `fedrane flower predict` uses them.
