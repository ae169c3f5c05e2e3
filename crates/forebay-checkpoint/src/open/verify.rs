//! A whole checkpoint, checked: every item, every byte that has a checksum, and what lies beside.

use super::files::has_tail;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::model::{Chunk, Entry, Kind};
use forebay_error::{Code, Error, Result};
use forebay_format::parallel;
use std::sync::Mutex;

/// The most faults that are kept.
const MAX_FAULTS: usize = 1000;

/// Objects above this many bytes are checked one at a time, whatever number of threads there is: what is built to look
/// through a pickle of hundreds of mebibytes has several times its bytes.
const LARGE_OBJECT: u64 = 1 << 20;

/// Something that is wrong with an entry.
#[derive(Debug)]
pub struct Finding {
    /// Its name.
    pub name: String,
    /// The data file that is at fault.
    pub file: String,
    /// What is wrong, and where.
    pub error: Error,
}

/// What a check found.
#[derive(Debug)]
pub struct Verdict {
    /// What is damaged, in the order of (file, offset), up to a thousand.
    pub faults: Vec<Finding>,
    /// How many more there are.
    pub more_faults: usize,
    /// What is sound but worth telling.
    pub warnings: Vec<Warning>,
    /// Bytes of items that were compared with a checksum.
    pub checked_bytes: u64,
    /// Bytes of items that have none.
    pub unchecked_bytes: u64,
}

/// Whether a lot of memory may be needed to check an item. What transforms were applied to may unfold to anything.
fn is_large_object(entry: &Entry, chunk: &Chunk) -> bool {
    let large = chunk.length > LARGE_OBJECT || !chunk.transforms.is_empty();
    large && matches!(entry.kind, Kind::Object { .. })
}

impl Checkpoint {
    /// Checks every item, and looks through the pickles of objects as a restore does. `each` is called after each with
    /// its bytes, from several threads; an error it returns ends the check.
    pub fn verify(&self, each: impl Fn(u64) -> Result<()> + Sync) -> Result<Verdict> {
        let mut jobs: Vec<(&Entry, &Chunk)> = Vec::new();
        for entry in &self.entries {
            jobs.extend(entry.chunks().iter().map(|chunk| (entry, chunk)));
        }
        jobs.sort_by_key(|(_, chunk)| (chunk.file, chunk.offset, chunk.length));
        let gate = Mutex::new(());
        let checked = parallel::map(&jobs, |(entry, chunk)| {
            let _one_large_at_a_time = is_large_object(entry, chunk).then(|| gate.lock());
            let looked_through = || self.look_through(entry, chunk);
            let result = self.verify_item(entry, chunk).and_then(|()| looked_through());
            each(chunk.length)?;
            Ok(result)
        });
        let mut verdict = Verdict {
            faults: Vec::new(),
            more_faults: 0,
            warnings: self.warnings.clone(),
            checked_bytes: 0,
            unchecked_bytes: 0,
        };
        for ((entry, chunk), result) in jobs.iter().zip(checked) {
            let has_checksum = chunk.data.as_ref().is_none_or(|place| !place.crcs.is_empty());
            match result? {
                Ok(()) if has_checksum => verdict.checked_bytes += chunk.length,
                Ok(()) => verdict.unchecked_bytes += chunk.length,
                Err(error) => self.fault(&mut verdict, entry, chunk, error),
            }
        }
        self.check_neighbours(&jobs, &mut verdict);
        self.check_tails(&jobs, &mut verdict);
        Ok(verdict)
    }

    fn fault(&self, verdict: &mut Verdict, entry: &Entry, chunk: &Chunk, error: Error) {
        if verdict.faults.len() >= MAX_FAULTS {
            verdict.more_faults += 1;
            return;
        }
        let file = self.files.get(chunk.file as usize).map(|file| file.name.clone());
        let file = file.unwrap_or_default();
        verdict.faults.push(Finding { name: entry.name.clone(), file, error });
    }

    /// Two items may be the same bytes (one value under two names), but not share some.
    fn check_neighbours(&self, jobs: &[(&Entry, &Chunk)], verdict: &mut Verdict) {
        for pair in jobs.windows(2) {
            let [(_, a), (entry, b)] = pair else { continue };
            let same = (a.offset, a.length) == (b.offset, b.length);
            let apart = a.offset.saturating_add(a.length) <= b.offset;
            if a.file == b.file && !same && !apart {
                let what = format!(
                    "the items at bytes {} (of {}) and {} (of {}) share bytes",
                    a.offset, a.length, b.offset, b.length
                );
                self.fault(verdict, entry, b, Error::new(Code::Overlap, what));
            }
        }
    }

    fn check_tails(&self, jobs: &[(&Entry, &Chunk)], verdict: &mut Verdict) {
        if self.origin == Origin::HfShards {
            return;
        }
        for file in jobs.chunk_by(|(_, a), (_, b)| a.file == b.file) {
            let ends = file.iter().map(|(_, chunk)| chunk.offset.saturating_add(chunk.length));
            let (Some(end), Some((_, chunk))) = (ends.max(), file.first()) else { continue };
            let Ok(open) = self.open_file(chunk.file) else { continue };
            if has_tail(open.size(), end) {
                let name = self.files.get(chunk.file as usize).map(|file| file.name.as_str());
                let text = format!(
                    "{} bytes behind the last item of {:?} belong to nothing",
                    open.size() - end,
                    name.unwrap_or_default()
                );
                verdict.warnings.push(Warning { concern: Concern::StaleItem, text });
            }
        }
    }
}
