"""Which backend runs a problem, why the others do not, and how the keys are cut: without running anything.

Run: python examples/05_explain_dispatch.py
"""

from leanmla import DecodeProblem, backends, device
from leanmla.split_plan import plan_splits

problem = DecodeProblem(
    format="fp8", num_heads=16, batch=4, total_q=4, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
    max_kv_len=131072, total_kv=4 * 131072,
)  # fmt: skip
here = device.describe("cpu")
print(f"problem {problem}\ndevice  {here.name}\n")
for name, reason in backends.reasons(problem, here).items():
    print(f"  {name:<10} {'can run' if reason is None else 'no: ' + reason}")
chosen = backends.choose(problem, here)
config = chosen.launch_config(problem, here)
print(f"\nauto takes {chosen.name}: {config.kernel}\n  {config.reason}\n")

lens = [131072, 1024, 1024, 0]
plan = plan_splits(lens, num_workers=8)
print(f"keys {lens} on 8 workers: {plan.splits_per_seq} items, balance {plan.balance:.0%}")
for worker, items in enumerate(plan.workers()):
    work = ", ".join(f"seq {i.seq} keys {i.kv_start}:{i.kv_end}" for i in items)
    print(f"  worker {worker}: {work}")
