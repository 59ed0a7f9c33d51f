# %% [markdown]
# # Reproducing one cell of the paper
#
# Each table and figure of the paper is one command, `fedrane reproduce TARGET`. A *cell* is one method on one dataset,
# at one α, with one seed. This tutorial looks at what a table would run, then runs one cell of it small enough for a
# laptop.
#
# ## What would run
#
# `--dry-run` trains nothing. It lists the cells, says which datasets are missing and how to get them, and estimates the
# time from earlier cells on this machine.

# %%
import subprocess
import sys


def command(*words):
    print("$ fedrane", *words)
    done = subprocess.run([sys.executable, "-m", "fedrane", *words], capture_output=True, text=True)
    print(done.stdout[:1500])
    return done.returncode


small = ("--dataset", "digits", "--alpha", "0.1", "--seeds", "1", "--rounds", "5")
command("reproduce", "table-gfl", "--dry-run", *small)

# %% [markdown]
# Without `--dataset` and the others, it is the paper's table: four datasets, three α, five seeds, eleven methods. The
# real cell of FedRANE on Fashion-MNIST at α = 0.1 is
#
# `fedrane data get fmnist` and then `fedrane reproduce table-gfl --dataset fmnist --alpha 0.1 --methods fedrane --seeds
# 1`
#
# How long that takes on your machine: add `--dry-run --measure`, which trains a few rounds to find out.
#
# ## Run a cell
#
# The built-in digits stand in for the paper's datasets. The settings are otherwise those of the table, except what the
# words change: five rounds of two epochs, and a small network.

# %%
words = ("--methods", "fedavg,fedrane", "model=mlp", "epochs=2")
status = command("reproduce", "table-gfl", *small, *words)

# %% [markdown]
# The paper has no numbers for digits, so no column shows them. For its own datasets, ours are shown beside the paper's.
#
# ## What is kept
#
# Each finished cell is a line of text: its settings, versions and results. The same command runs nothing twice, and
# continues after a stop or a kill.

# %%
import json
from pathlib import Path

for line in Path("experiments/results/digits.jsonl").read_text().splitlines():
    cell = json.loads(line)
    print(cell["method"], "seed", cell["seed"], "keys:", ", ".join(sorted(cell)[:8]), "…")
print(sorted(path.name for path in Path("runs/reproduce").iterdir() if path.is_file()))

# %% [markdown]
# The table is there as Markdown, CSV and LaTeX. To add your own method as a row, name its file: `fedrane reproduce
# table-gfl --methods all,prox.py:Prox …` (second tutorial). All targets, and what we measured: docs/reproduce.md and
# docs/paper.md.
