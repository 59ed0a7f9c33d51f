import time, sys, json, torch, warnings
import fedrane
from fedrane.data.partition import Partitioning
from fedrane.engines import make
from fedrane.run import _Loop, as_dataset, resolve, make_partition
def rounds(engine="auto", n=4, **kw):
    e = fedrane.Experiment(**{"clients":20,"partition":Partitioning(alpha=0.5),"epochs":5,"batch":128,"rounds":n,"eval_every":1,"engine":engine,"device":"cuda","data_root":"/tmp/data",**kw})
    t=time.perf_counter()
    class C(fedrane.Callback):
        def message(self,t): print("   says:",t)
    r = fedrane.run(e, callbacks=[C()])
    last=r.history[-1]
    print(f"{kw.get('dataset')} {kw.get('method')} {engine} {r.experiment.precision}: {max(h['samples_per_second'] for h in r.history):,.0f} samples/s, round {last['seconds']:.3f} s, eval {last['eval_seconds']:.3f} s, first {r.history[0]['seconds']:.1f} s, global {last.get('global/accuracy',0):.4f} personal {last.get('personal/accuracy',0) or 0:.4f} peak {torch.cuda.max_memory_allocated()/2**30:.1f} total {time.perf_counter()-t:.1f}s",flush=True)
    return r
