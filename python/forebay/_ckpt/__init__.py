"""Checkpoints of training: what `forebay.Checkpointer` and `forebay.dcp` are made of.

One concern a module, from the state downwards:

- `flatten`: nested state to flat names, by the rules of `torch.distributed.checkpoint`.
- `held`, `meshes`, `ties`, `objects`: what this rank holds of each value, and which values are the same memory.
- `ranks`, `frames`, `agreement`, `share`: what the ranks tell one another at the first save of a structure, and who
  writes what several of them hold.
- `plans`: all of that kept for the next save, and how a state is recognised without building it again.
- `shadow`, `stall`, `handle`, `saving`, `retention`: a save under way.
- `targets`, `restoring`, `optimizers`: the way back.
- `preempt`: agreeing on a last step when the job is told to end.
- `checkpointer`: the class that users see.

These modules import torch; `import forebay` alone does not import them.
"""
