import functools, sys, torch
from benchmarks.moe_data import make_layers, make_routings
from benchmarks.timing import graph_time, read_rate
from quads_common.kernels import hopper
from quads_common.kernels.hopper import DecodePlan
from quads_common.kernels.moe import *
from quads_common.kernels.moe import GATE_UP, DOWN
from quads_common.kernels.route import Routes, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
torch.manual_seed(0)
shape=sys.argv[1] if len(sys.argv)>1 else "qwen3-30b-a3b"
Ms=[int(m) for m in (sys.argv[2] if len(sys.argv)>2 else "1,4,16,32,64,128,256").split(",")]
layers=make_layers(shape,3); rate=read_rate(2)
for l in layers: l.t=(GATE_UP.tile(l.w13),DOWN.tile(l.w2)); l.w13_bf16=l.w2_bf16=None
print("read rate",rate/1e12)
def T(f,pairs): return graph_time([functools.partial(f,*p) for p in pairs])
for M in Ms:
    rs=make_routings(shape,M); pairs=[(l,r) for r in rs for l in layers]
    floor=sum(layers[0].nbytes(r) for r in rs)/len(rs)/rate*1e6
    out=[]
    for act in ("nvfp4","bf16"):
        h=T(lambda l,r: fused_moe_hopper(r.x,*l.t,r.weights,r.ids,act=act),pairs)
        out.append(f"{act} hopper {h:.1f}")
        if len(sys.argv)<=3: out.append(f"triton {T(lambda l,r: fused_moe_triton(r.x,l.w13,l.w2,r.weights,r.ids,act=act),pairs):.1f} tiled {T(lambda l,r: fused_moe_triton(r.x,*l.t,r.weights,r.ids,act=act,tiled=True),pairs):.1f}")
        if M<=512:
            E=layers[0].experts
            st=[]
            q=lambda r: quantize_rows(r.x,quantized=act=="nvfp4").operand
            R={id(r): (q(r),Routes(r.ids,None,E)) for r in rs}
            st.append(f"quant {T(lambda l,r: q(r),pairs):.1f}")
            if len(pairs[0][1].ids.flatten())>32 : st.append(f"table {T(lambda l,r: hopper.make_decode_table(R[id(r)][1],DecodePlan(True,32)),pairs):.1f}")
            for plan in ((DecodePlan(True,32),DecodePlan(False,16)) if "qwen3-30b" in shape else (hopper.decode_plan(M,8,E,layers[0].w2.shape[1],layers[0].w2.shape[2],132),)):
                if plan: st.append(f"{'fused' if plan.fused else 'pair'}+table {T(lambda l,r: hopper.decode_experts(R[id(r)][0],*l.t,R[id(r)][1],r.weights,plan,None),pairs):.1f}")
            sl=torch.randn(M*rs[0].ids.shape[1],rs[0].x.shape[1],device="cuda")
            st.append(f"sum {T(lambda l,r: sum_slots_triton(sl,R[id(r)][1],torch.bfloat16),pairs):.1f}")
            out.append("["+", ".join(st)+"]")
    print(f"M {M} floor {floor:.1f}: "+"; ".join(out),flush=True)
