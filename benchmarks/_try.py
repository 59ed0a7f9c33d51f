"""Throw-away: what a stacked, captured step costs."""
import sys, time, torch
from dataclasses import replace
from torch.func import vmap
from fedrane.algorithm import Algorithm, Work
from fedrane.methods import METHODS
from fedrane.models import build
from fedrane.models.stacked import AsProducts
from fedrane.task import *
from fedrane.sgd import SGD
from fedrane import tree
import torch.utils._pytree as pt
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
def bench(model, shape, S, compute, method, products=True, B=128, steps=10, prof=False):
    torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.preferred_linalg_library("cusolver") if dev.type=="cuda" else None
    alg = METHODS[method].kind(**METHODS[method].preset)
    body, head = build(model, shape, 10)
    task = alg.prepare(Task.build(body, head, shape, 10, device=dev, compute=compute, sgd=SGD()))
    server = alg.init(task, Roster(torch.full((S,), 1000, device=dev)))
    def cl(k): return Client(torch.tensor(k,device=dev), torch.tensor(1000,device=dev), torch.full((10,),100.,device=dev), torch.tensor(5,device=dev), torch.tensor(1,device=dev), torch.tensor(0.05,device=dev), S)
    ctxs = [Context(alg.send(task, server, cl(k)), alg.join(task, server, cl(k)), cl(k)) for k in range(S)]
    works = [alg.begin(task, c) for c in ctxs]
    data = torch.randint(0,255,(10000,*shape),dtype=torch.uint8,device=dev); ys = torch.randint(0,10,(10000,),device=dev)
    table = torch.randint(0,10000,(200,B),device=dev); livet = torch.ones(200,B,dtype=torch.bool,device=dev); livet[7,100:] = False
    work = tree.stack([w._asdict() for w in works])
    def cl_last(t): return t.permute(0,1,3,4,2).contiguous().permute(0,1,4,2,3) if t.dim()==5 else t
    work = tree.map(cl_last, work)
    client = Client(*[torch.stack(v) if isinstance(v[0],torch.Tensor) else v[0] for v in zip(*[c.client for c in ctxs])])
    own = tree.stack([c.own for c in ctxs])
    down = ctxs[0].down
    pos = torch.arange(S, device=dev)
    key = torch.zeros(S,dtype=torch.int64,device=dev)
    def one(w, own, c, x, y, live, key):
        c = Client(*c, client.population) if not isinstance(c, Client) else c
        return alg.step(task, Context(down, own, c), Work(**w), Batch(x, y, live, key))._asdict()
    cols = tuple(client)[:-1]
    def step():
        idx = table[pos]
        x = data[idx].to(torch.float32)*0.004 - 0.5
        with AsProducts() if products else torch.no_grad():
            pass
        m = AsProducts() if products else None
        if m: m.__enter__()
        try: new = vmap(one)(work, own, cols, x, ys[idx], livet[pos], key)
        finally:
            if m: m.__exit__(None,None,None)
        for a, b in zip(pt.tree_leaves(work), pt.tree_leaves(new)): a.copy_(b)
        pos.add_(1).remainder_(200)
    t0=time.perf_counter()
    if dev.type=="cuda":
        s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(2): step()
        torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): step()
        run = g.replay
    else: run = step; step()
    for _ in range(3): run()
    if dev.type=="cuda": torch.cuda.synchronize()
    t1=time.perf_counter()
    for _ in range(steps): run()
    if dev.type=="cuda": torch.cuda.synchronize()
    dt=(time.perf_counter()-t1)/steps
    mem = torch.cuda.max_memory_allocated()/2**30 if dev.type=="cuda" else 0
    print(f"{model:9s} S={S:3d} {str(compute):15s} {method:8s} products={products} {dt*1e3:8.2f} ms  {S*B/dt:12,.0f} samples/s  start {t1-t0:.1f}s mem {mem:.1f}", flush=True)
    if prof and dev.type=="cuda":
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(3): run()
            torch.cuda.synchronize()
        print(p.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=90), flush=True)
    torch.cuda.empty_cache() if dev.type=="cuda" else None
