"""Checkpoints of training: what `forebay.Checkpointer` and `forebay.dcp` are made of.

One concern a module, from the state downwards:

- `flatten`: nested state to flat names, by the rules of `torch.distributed.checkpoint`.
- `kinds`, `held`, `meshes`, `ties`, `objects`, `perrank`: what this rank holds of each value, and which are one memory.
- `plans`, `layout`: a structure kept for the next save; what others and the native part need to know of it.
- `ranks`, `frames`, `description`, `agreement`, `writers`, `share`: what ranks tell one another at the first save of a
  structure, and who writes what several of them hold.
- `training`, `snapshot`, `shadow`, `stall`, `structures`, `natives`, `asked`, `sidefiles`, `saving`, `handle`,
  `background`, `retention`: a save under way.
- `choosing`, `targets`, `reading`, `restoring`, `restorereport`: the way back; `filling`: into memory that waits;
  `optimizers`, `ownvalues`, `nests`: into what does not wait yet, or by other names; `handover`: to the objects that states
  belong to; `node...`: reading once a host.
- `preempt`, `life`: agreeing on a last step when the job is told to end; exits, forks.
- `checkpointer`: the class that users see; `settings`: its arguments.

These modules import torch; `import forebay` alone does not import them.
"""
