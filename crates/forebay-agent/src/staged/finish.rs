//! Finishes a save whose process has died. **unsafe**: its memory is given by address.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{AttemptId, CommitInfo, Policy, Root, SystemClock, step_state};
use forebay_checkpoint::save::{self, Bequest, Commit, OurMetadata, Request, Source};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_error::{Code, Error, Result};
use forebay_store::PosixStore;

use super::{Save, Saves, lock};
use crate::track::{again, shown_path};

/// Staging memory of a save that is finished: slots of a whole piece, enough to keep a drive at work.
const ARENA_BYTES: usize = 32 << 20;
const SLOT_BYTES: usize = 4 << 20;
/// Threads that write.
const WRITERS: usize = 4;
/// How often the thread looks at its save and at the agent.
const TICK: Duration = Duration::from_millis(200);
/// How often it looks into the folder.
const LOOK: Duration = Duration::from_secs(2);
/// How long an agent that ends waits for a save to give up.
const STOP_TIME: Duration = Duration::from_secs(5);

/// How it ended.
enum End {
    Committed,
    /// It was committed by the ranks themselves, or a newer save of the step was.
    NotNeeded,
}

/// Finishes a save, and says what became of it.
pub(super) fn run(saves: &Saves, save: &Save) {
    let (job, step, rank) = (&save.job, save.shown.step, save.shown.rank);
    let who = format!("rank {rank} of {}", save.shown.world);
    let span = tracing::info_span!("finish", job = %job, step, rank);
    let _entered = span.enter();
    let result = match finish(saves, save) {
        Ok(End::Committed) => {
            tracing::info!("a save of a process that died is committed ({who})");
            "committed"
        }
        Ok(End::NotNeeded) => {
            tracing::info!(
                "a process has ended: its save, or a newer one, is committed already ({who})"
            );
            "not_needed"
        }
        Err(error) => {
            let error = error.render();
            tracing::warn!(error, "a save of a process that died is not committed ({who})");
            "failed"
        }
    };
    saves.counts.finished(result);
}

fn finish(saves: &Saves, save: &Save) -> Result<End> {
    let bequest = save.bequest()?;
    let folder = shown_path(&save.folder);
    let root = Root {
        store: Arc::new(PosixStore::handed_over(again(&save.folder)?, &folder)?),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    };
    let (dead, step) = (bequest.spec.attempt, bequest.spec.step);
    let successor = dead.successor();
    let successor = successor.ok_or_else(|| Error::new(Code::Usage, "a save of a successor"))?;
    let epoch = bequest.spec.epoch;
    let looker = Looker { root: root.clone(), step, epoch, dead, successor };
    let until = Instant::now() + saves.times.settle;
    while Instant::now() < until && !saves.stopping.load(Ordering::Relaxed) {
        std::thread::sleep(TICK.min(saves.times.settle));
    }
    if looker.is_committed()? {
        return Ok(End::NotNeeded);
    }
    let bytes = save.shown.bytes;
    tracing::info!(bytes, attempt = %successor, "a process has died: its save is finished here");
    let running = start(saves, save, bequest, root, successor)?;
    let (mut looked, mut stopping) = (Instant::now(), None);
    loop {
        match running.wait(TICK) {
            Ok(true) => return Ok(End::Committed),
            Ok(false) => {}
            // Who was quicker may have been the ranks that live.
            Err(_) if looker.is_committed().unwrap_or(false) => return Ok(End::NotNeeded),
            Err(error) => return Err(error),
        }
        lock(&save.progress).written = running.progress().0;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            match looker.look() {
                Ok((true, _)) => running.cancel(),
                Ok((false, begun)) => lock(&save.progress).begun = begun,
                Err(error) => tracing::debug!(%error, "cannot look how the save stands"),
            }
        }
        if saves.stopping.load(Ordering::Relaxed) {
            running.cancel();
            let since = *stopping.get_or_insert_with(Instant::now);
            if since.elapsed() >= STOP_TIME {
                return Err(Error::new(Code::Cancelled, "the agent ends, and storage hangs"));
            }
        }
    }
}

fn start(
    saves: &Saves,
    save: &Save,
    bequest: Bequest,
    root: Root,
    successor: AttemptId,
) -> Result<save::Save> {
    let Bequest { mut spec, mut info, files, overwrite, plan, offsets, objects, side_files } =
        bequest;
    let mapping = save.memory.map()?;
    let base = mapping.address();
    // Inside of the mapping, as the bequest was checked against its size.
    let place = |offset: &u64| Source { place: Place::Host, address: base + offset };
    let sources: Vec<Source> = offsets.iter().map(place).collect();
    spec.attempt = successor;
    spec.who = format!("agent {}, for {}", std::process::id(), spec.who);
    info.attempt = successor.to_string();
    let request = Request {
        plan,
        root,
        policy: Policy { overwrite, appear: saves.times.appear, ..Policy::default() },
        hints: None,
        spec,
        info,
        side_files,
        files,
        writers: Some(WRITERS),
        stream: None,
        // Through the arena, by copies: others may write to the memory.
        in_place: false,
        commit: Commit::Protocol,
    };
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: ARENA_BYTES, slot_bytes: SLOT_BYTES };
    let arena = Arena::without_margin(&Device::Host, &config)?;
    let keep = Some(Box::new(mapping) as Box<dyn std::any::Any + Send>);
    // SAFETY: the sources lie in the mapping, which `keep` owns and which cannot shrink, and this process writes to
    // none of it. Another that has the memory may, which the contract allows as nothing is taken in place.
    unsafe { save::Save::start(&engine, &arena, request, &sources, objects, keep) }
}

/// Looks how the step stands.
struct Looker {
    root: Root,
    step: u64,
    epoch: u64,
    dead: AttemptId,
    successor: AttemptId,
}

impl Looker {
    /// Whether this very save is committed, by whomever, or a newer one is; and of how many ranks it is being finished.
    /// Errors: I/O.
    fn look(&self) -> Result<(bool, u32)> {
        let Some(state) = step_state(&self.root, self.step, Duration::ZERO)? else {
            return Ok((false, 0));
        };
        let committed = state.commit.as_ref().is_some_and(|commit| self.is_settled_by(commit));
        let own = state.attempts.iter().find(|one| one.attempt == self.successor);
        Ok((committed, own.map_or(0, |own| own.ranks.1)))
    }

    /// A commit of this save, or of one that came after it: it must not be replaced by what is older.
    fn is_settled_by(&self, commit: &CommitInfo) -> bool {
        let (dead, epoch) = (self.dead, self.epoch);
        let later = |one: AttemptId| one.run == dead.run && one.place() >= dead.place();
        commit.epoch > epoch || commit.attempt.is_some_and(later)
    }

    fn is_committed(&self) -> Result<bool> {
        self.look().map(|(committed, _)| committed)
    }
}
