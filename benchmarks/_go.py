import sys; sys.path.insert(0,"benchmarks")
from _gpu import *
import cProfile, pstats, numpy as np
from fedrane.data.dataset import Dataset
rng=np.random.default_rng(0)
y=rng.integers(0,10,60000); x=rng.integers(0,255,(60000,3,32,32),dtype=np.uint8)
fake=Dataset("fake",x[:50000],y[:50000],x[50000:],y[50000:],tuple("abcdefghij"),(0.5,)*3,(0.25,)*3)
def fr(n=4,**kw):
    e=fedrane.Experiment(clients=20,partition=Partitioning(alpha=0.5),rounds=n,device="cuda",lr=0.01,**kw)
    r=fedrane.run(e,dataset=fake)
    print("fake cifar",kw,[f"{h['samples_per_second']:,.0f}" for h in r.history],[round(h['eval_seconds'],3) for h in r.history],f"peak {torch.cuda.max_memory_allocated()/2**30:.1f}",flush=True)
for m in ("fedavg","fedrane"):
    rounds(dataset="fmnist", method=m, lr=0.1 if m=="fedavg" else 0.5)
    fr(method=m,model="resnet18")
p=cProfile.Profile(); p.enable(); rounds(dataset="fmnist", method="fedavg", n=6); p.disable()
pstats.Stats(p).sort_stats("cumtime").print_stats(40)
p=cProfile.Profile(); p.enable(); fr(n=3,method="fedavg",model="resnet18"); p.disable()
pstats.Stats(p).sort_stats("cumtime").print_stats(40)
