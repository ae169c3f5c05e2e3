//! The commit: how a step becomes visible, all of it or none, without collective calls and without a coordinator.
//!
//! # The protocol
//!
//! A step is a folder. It is a checkpoint from the instant at which `.metadata` is in it, for stock readers as for us.
//! Everything before that instant may fail, everything after it is tidying up. Files are described at [`Layout`].
//!
//! 1. **Begin.** Each rank creates `begin-<rank>` and sets room aside for its part and for a failure, so that a full
//!    disk can be reported later. Names of data files carry the attempt, so nothing committed is ever touched.
//! 2. **Data, then part.** A rank makes its files durable, then publishes `part-<rank>` with what it contributes and
//!    with what all must agree on: world size, structure, epoch.
//! 3. **Commit.** One rank, the committer, sees all parts, assembles the manifest and `.metadata`, makes both durable
//!    under names of its own, and *decides*: it creates `decision`, which names its staged source. Rank 0 is the
//!    first committer; it bumps a counter meanwhile, and when that stands still others take over, few at first.
//! 4. **Publish.** The source that the decision names is published as `.metadata`, by the committer as a rule, by any
//!    other rank if it is slow. The store lets one of them. `outcome` then tells those who look later.
//!
//! A failure is a decision too: the rank that meets it publishes the room it had set aside as `decision`. A rank that
//! fails has not contributed its part, so no commit can be decided without it; and since `decision` is created once,
//! all ranks read the same answer. Whoever wants to know the outcome reads one small object.
//!
//! # What can never happen, and why
//!
//! - **A step that is not complete becomes visible.** A commit decision needs every part, a part is published after its
//!   data is durable, and the committer has seen every file with its size.
//! - **What could not be made durable is built upon.** The store tells it apart from a lost reply (`not_durable`),
//!   and the attempt fails: a part is taken back by an abort, a decision by taking what it names away. Only what
//!   tells of life, or tidies up, may be lost. Where `.metadata` itself is meant, the commit stands and says that it
//!   may not last.
//! - **An overwrite loses the old step.** Its files are not touched, and `.metadata` is replaced in one step,
//!   expecting the version that rank 0 saw when it began. Two writers that race: one wins, the other is told
//!   `lost_commit`.
//! - **A writer thought dead breaks what came after it.** Taking an attempt's right to publish
//!   (`withdraw`) removes its begin records and then its staged sources; a publisher looks at its begin record last of
//!   all. Data is removed only after that, after another look at the commit point. A new life of a job claims the
//!   next epoch, and withdraws what lower ones have under way.
//! - **A step is removed under a reader.** `.metadata` goes first, then leases and a grace time are waited out, then
//!   the commit point is read again, then data goes.
//! - **Somebody waits for ever.** Every wait has an end on the waiter's own clock: the deadline, the lease of a
//!   silent rank, the time for ranks to appear, the takeover times.
//!
//! Where data lie on the drives of several nodes ([`SplitStore`](forebay_store::SplitStore)) all of this holds of the
//! records, which are in one place. Of files on other nodes a committer has the word of their ranks, whose parts say
//! that they are durable; a collector removes what its own node has.
//!
//! Nothing is assumed of a store beyond its interface; no two clocks are compared; a reply that gets lost is looked
//! up. What remains, because no store looks at two objects in one step:
//!
//! - A writer that stops between its last look (epoch, begin record) and the publication still gets the step in, if
//!   nothing has withdrawn its source: the step is whole, and not on the newer epoch's line.
//! - On a store that copies when it publishes, a publication that was sent off before its source was removed may arrive
//!   a little later: [`GcOptions::settle`] is the time that it gets.
//! - On a store that moves in two steps (link, unlink), a prune that stops between them for longer than a writer waits
//!   for it (half a minute) can unlink what that writer has put in the place of the pruned step.
//!
//! # Hearing of it sooner
//!
//! All of the above works by looking into the store from time to time, and takes a minute or two to notice that a rank
//! died. [Hints] make it seconds: ranks wake each other, the lowest rank that is heard of stands in for a committer
//! that is not, and a rank that shows no sign of life, neither by hints nor in the store, for ten seconds ends the
//! attempt. A hint only says where to look; the one that is taken at its word, a failure, can cost no more than the
//! attempt.
//!
//! # How a save calls this
//!
//! ```text
//! once a life:   epoch = claim(&root, run, restored_step, who)        on one rank, told to the others
//! every save:    attempt = Attempt::begin(&root, &policy, hints, spec)?
//!                (name, file) = attempt.data_file(0, bytes)?           write through file.sink(), file.seal()
//!                attempt.beat()                                        from time to time, from any thread
//!                attempt.check()?                                      before long work: failed elsewhere?
//!                attempt.publish_part(&part)?                          names, sizes, checksums of this rank
//!                attempt.wait_or_commit(&mut |gathered| assemble(gathered))?
//! on any error:  return Err(attempt.fail(error))                       every rank gets it
//! after it:      gc(&root, &GcOptions::default()), prune(&root, &retention, &options)
//! to restore:    step = latest(&root)?, lease = ReadLease::take(&root, step)?, lease.beat() meanwhile
//! ```
//!
//! An attempt that is dropped in between is a dead one: the others hear of it by its silence, and a collection
//! removes it.

mod abort;
mod adopt;
mod aside;
mod attempt;
mod census;
mod clock;
mod contribute;
mod dead;
mod epoch;
mod frame;
mod gc;
mod hints;
mod id;
mod index;
mod keep;
mod lease;
mod line;
mod marks;
mod mention;
mod names;
mod policy;
mod prune;
mod publish;
mod readers;
mod record;
mod root;
mod steps;
mod strays;
mod survey;
mod turn;
mod uploads;
mod watch;
mod withdraw;

pub use adopt::{Adopted, Adoption, Standing};
pub use attempt::{Attempt, Spec};
pub use clock::{Clock, SystemClock};
pub use epoch::{Other, claim, claim_among};
pub use gc::{GcOptions, GcReport, gc, gc_beside, gc_folders};
pub use hints::{Answer, Board, Hint, Hints, Order, Pulse, Suspect};
pub use id::{AttemptId, RunId, StructureHash};
pub use index::listing;
pub use line::{Claims, Ranked, latest, latest_of, require};
pub use marks::{Hold, Marks, PIN_NAME_BYTES_MAX, Pin};
pub use names::{
    Layout, MANIFEST_PREFIX, METADATA, attempt_of_file, data_file, manifest, step_folder,
    step_of_folder,
};
pub use policy::Policy;
pub use prune::{
    MayGo, PruneOptions, PruneReport, Retention, is_being_removed, prune, retire, retire_while,
};
pub use publish::{Assembled, Gathered};
pub use readers::{READ_LEASE, ReadLease};
pub use record::{Failure, FileRef};
pub use root::{Identify, Root};
pub use steps::{
    AttemptState, AttemptStatus, CommitInfo, State, StepState, numbers, step_state, steps,
};
pub use watch::Committed;
