import torch, itertools, sys
from fedrane.models import kernels as K, stacked
import triton
from triton.testing import do_bench
S,B=20,128
layers=[("stem",3,64,32,7,2,3),("s1",64,64,8,3,1,1),("s2a",64,128,8,3,2,1),("s2sc",64,128,8,1,2,0),("s2",128,128,4,3,1,1),("s3a",128,256,4,3,2,1),("s3",256,256,2,3,1,1),("s4a",256,512,2,3,2,1),("s4",512,512,1,3,1,1),("c1",1,16,28,5,1,0),("c2",16,32,12,5,1,0)]
count={"stem":1,"s1":4,"s2a":1,"s2sc":1,"s2":3,"s3a":1,"s3":3,"s4a":1,"s4":3,"c1":0,"c2":0}
tot=[0,0,0]
orig=K._tiles
for name,C,O,H,k,s,p in layers:
    x=torch.randn(S,B,H,H,C,device="cuda",dtype=torch.bfloat16); w=torch.randn(S,O,k,k,C,device="cuda")
    r=stacked._Side.of(H,k,s,p); sides=(r.low,r.taps,r.low,r.taps)
    y=K.convolve(x,w,None,sides,s,p)
    fl=2*y.numel()*r.taps*r.taps*C
    t=[do_bench(f,warmup=5,rep=20) for f in (lambda: K.convolve(x,w,None,sides,s,p), lambda: K.by_input(y,w,x,sides,s,p), lambda: K.by_weight(x,y,w,sides,s,p))]
    for i in range(3): tot[i]+=t[i]*count[name]
    print(f"{name:5s} "+"  ".join(f"{a*1e3:7.1f}us {fl/a/1e9:6.0f}TF" for a in t),flush=True)
print(tot)
if len(sys.argv)>1:
    for name,C,O,H,k,s,p in layers:
        x=torch.randn(S,B,H,H,C,device="cuda",dtype=torch.bfloat16); w=torch.randn(S,O,k,k,C,device="cuda")
        r=stacked._Side.of(H,k,s,p); sides=(r.low,r.taps,r.low,r.taps); y=K.convolve(x,w,None,sides,s,p)
        res=[]
        for m,n,kk,st,nw in itertools.product((64,128),(64,128),(32,64),(3,),(4,8)):
            K._tiles=lambda rows,cols,depth: (m,max(16,min(n,triton.next_power_of_2(cols))),max(16,min(kk,triton.next_power_of_2(depth))))
            K.WARPS=nw
            try: res.append((do_bench(lambda: K.convolve(x,w,None,sides,s,p),warmup=3,rep=8),do_bench(lambda: K.by_input(y,w,x,sides,s,p),warmup=3,rep=8),(m,n,kk,nw)))
            except Exception as e: pass
        print(name,"fwd",[(round(a*1e3,1),c) for a,b,c in sorted(res)[:3]],"dgrad",[(round(b*1e3,1),c) for a,b,c in sorted(res,key=lambda v:v[1])[:3]],flush=True)
