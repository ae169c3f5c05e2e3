//! Reading batches with the engine. **unsafe**: memory of a slot is given to it by address.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::{Arena, ArenaConfig, Device, Slot};
use forebay_engine::{Engine, EngineConfig, LoadOptions, Selection, sources_of};
use forebay_error::{Code, Error, Result};
use forebay_format::{Model, verify_checks};

use super::Source;
use super::slabs::{ALIGN, BATCH_BYTES, Want};

/// Batches that are held at one time, at the most: one is being read, one waits, one is being used.
pub(crate) const SLOTS: usize = 3;

/// Staging memory of the engine, for what is not read straight into its target.
const ENGINE_BYTES: usize = 64 << 20;

/// How often `go` is asked while a batch is read.
const TICK: Duration = Duration::from_millis(100);

/// Reads batches.
pub(crate) struct Loader {
    engine: Arc<Engine>,
    pool: Arc<Arena>,
    /// Checksums that were compared: those of torch are of whole items, which many boxes may lie in.
    compared: HashSet<(PathBuf, u64)>,
    /// All of a model's were: it has the same for every batch.
    all_compared: bool,
}

/// A batch that was read.
pub(crate) struct Loaded {
    slot: Arc<Slot>,
    /// The boxes, and where each starts in the slot.
    pub(crate) parts: Vec<(Want, usize)>,
}

impl Loaded {
    /// The bytes of a box.
    pub(crate) fn bytes(&self, part: usize) -> &[u8] {
        let Some((want, start)) = self.parts.get(part) else { return &[] };
        let end = start + want.bytes as usize;
        self.slot.bytes(end).get(*start..end).unwrap_or_default()
    }
}

impl Loader {
    pub(crate) fn new() -> Result<Self> {
        let config = EngineConfig { arena_bytes: ENGINE_BYTES, ..EngineConfig::default() };
        let slot_bytes = BATCH_BYTES as usize;
        // A slot has a margin beside its payload.
        let size_bytes = SLOTS * (slot_bytes + (1 << 20));
        let pool = Arena::new(&Device::Host, &ArenaConfig { size_bytes, slot_bytes })?;
        let engine = Engine::new(Device::Host, config);
        Ok(Self { engine, pool, compared: HashSet::new(), all_compared: false })
    }

    /// Reads a batch, and compares the checksums of what it lies in. Waits while all slots are out; `go` is asked now
    /// and then, and ends it with its error.
    pub(crate) fn load(
        &mut self,
        source: &Source,
        mut wants: Vec<Want>,
        go: &(dyn Fn() -> Result<()> + Sync),
    ) -> Result<Loaded> {
        let (model, wanted) = source.model(&wants)?;
        // The engine takes its targets in the order of the files.
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        let place = |at: &usize| {
            let entry = wanted.get(*at).and_then(|want| model.catalog.tensors.get(want.tensor));
            entry.map(|entry| (entry.file, entry.offset))
        };
        order.sort_by_key(place);
        let wanted = order.iter().filter_map(|&at| wanted.get(at).cloned()).collect();
        wants = order.iter().filter_map(|&at| wants.get(at).cloned()).collect();
        let mut selection = Selection::new(&model.catalog, wanted)?;
        if !model.catalog.has_blocks {
            // Records may lie in many boxes: they are compared below, each once.
            selection = selection.unchecked();
        }
        let (_, plan) = selection.plan(self.engine.config().piece_bytes)?;
        let (parts, bytes) = place_parts(wants);
        if bytes > self.pool.slot_bytes() as u64 {
            let what = format!("a box of {bytes} bytes cannot be cut into smaller ones");
            return Err(Error::new(Code::Unsupported, what));
        }
        let slots = self.pool.acquire(1, &|| go().is_err())?;
        let slot = slots.into_iter().next();
        let slot = slot.ok_or_else(|| Error::new(Code::Internal, "no slot in a pool of slots"))?;
        let slot = Arc::new(slot);
        let session = self.engine.start(plan, sources_of(&model.files)?, LoadOptions::default())?;
        let addresses: Vec<u64> =
            parts.iter().map(|(_, start)| (slot.address() + start) as u64).collect();
        // SAFETY: each box has its own bytes of the slot, which is ours as long as the owner lives; nobody reads them
        // before the session has ended well: only then is the slot handed on.
        unsafe { session.provide(&addresses, None, Some(Box::new(slot.clone())))? };
        while !session.wait(TICK)? {
            if let Err(ended) = go() {
                session.cancel();
                return Err(ended);
            }
        }
        session.finish()?;
        let is_whole = matches!(model, Cow::Borrowed(_));
        if !(is_whole && self.all_compared) {
            self.compare(&model, go)?;
        }
        self.all_compared |= is_whole;
        Ok(Loaded { slot, parts })
    }

    /// Compares the checksums that the engine does not, those of items as wholes; each once.
    fn compare(&mut self, model: &Model, go: &(dyn Fn() -> Result<()> + Sync)) -> Result<()> {
        if model.catalog.has_blocks || model.catalog.checks.is_empty() {
            return Ok(());
        }
        let mut catalog = model.catalog.clone();
        catalog.checks.retain(|check| {
            let path = model.files.get(check.file).map(|file| file.path.clone());
            self.compared.insert((path.unwrap_or_default(), check.offset))
        });
        let all: Vec<usize> = (0..catalog.tensors.len()).collect();
        verify_checks(&catalog, &model.files, &all, |_| go()).map(drop)
    }
}

/// Where each box starts in its slot, and bytes in all.
fn place_parts(wants: Vec<Want>) -> (Vec<(Want, usize)>, u64) {
    let mut at = 0_u64;
    let place = |want: Want| {
        let start = at as usize;
        at += want.bytes.next_multiple_of(ALIGN);
        (want, start)
    };
    (wants.into_iter().map(place).collect(), at)
}
