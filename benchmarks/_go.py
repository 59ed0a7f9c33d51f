import sys; sys.path.insert(0,"benchmarks")
from _gpu import *
import cProfile, pstats
for ds in ("fmnist","cifar10"):
    for m in ("fedavg","fedrane"):
        rounds(dataset=ds, method=m, lr=0.1 if m=="fedavg" else 0.5)
p=cProfile.Profile(); p.enable(); rounds(dataset="fmnist", method="fedavg", n=6); p.disable()
pstats.Stats(p).sort_stats("cumtime").print_stats(45)
