//! Names of files and records.

use super::id::AttemptId;

/// The object whose presence makes a step a checkpoint: the one commit point.
pub const METADATA: &str = ".metadata";
/// How names of manifests start.
pub const MANIFEST_PREFIX: &str = "forebay.manifest-";
/// The folder of records.
const RECORDS: &str = ".forebay";
/// The folder of epochs, of the checkpoint root.
pub(crate) const EPOCHS: &str = ".forebay/epoch/";

/// The folder of a step below the checkpoint root: `step-<N>`, decimal, without leading zeros.
pub fn step_folder(step: u64) -> String {
    format!("step-{step}")
}

/// The step whose folder has that name.
pub fn step_of_folder(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_folder(step) == name).then_some(step)
}

/// Where the files of a step are. Keys are relative to the store, which is opened at the checkpoint root.
///
/// ```text
/// step-<N>/                              empty where the store is the step itself
///   .metadata                            the commit point
///   <attempt>_<rank>_<n>.distcp          data, any name that starts with `<attempt>_`
///   forebay.manifest-<attempt>_<rank>    the manifest; <rank> is the committer that wrote it
///   .forebay/<attempt>/
///     begin-<rank>      the rank takes part (Begin); removed first when an attempt is withdrawn
///     beat-<rank>       a counter, while the rank works (Beat)
///     room-<rank>       room for its part, set aside at the start
///     part-<rank>       what it contributes (Part); was room-<rank>
///     fail-<rank>       room for its failure, set aside at the start; becomes `decision`
///     committer         a counter of the rank that gathers parts (Beat)
///     metadata-<rank>   what that committer wants to publish; becomes `.metadata`
///     decision          created once: commit, and which source, or abort, and why (Decision)
///     outcome           created once after that: how it ended (Outcome)
///     removing          the commit is being pruned
///     unpublished-<..>  what was `.metadata`, until the data is gone
///   .forebay/readers/<16 hex digits>     a reader's lease (Beat)
/// .forebay/epoch/<8 hex digits>          who writes the root (EpochClaim)
/// .forebay/pins/<NAME>                   a name for a step, which keeps it (Pin)
/// .forebay/holds/<STEP>                  a step that may be neither removed nor replaced (Hold)
/// .forebay/alive/<run>/beat-<rank>       a counter of a rank that hints do not get through of (Beat)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    prefix: String,
}

/// What an object of a step folder is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// `.metadata`.
    Metadata,
    /// Data, side file or manifest of an attempt.
    File(AttemptId),
    /// A record of an attempt.
    Record(AttemptId),
    /// A reader's lease.
    Reader,
    /// Anything else; never touched.
    Foreign,
}

impl Layout {
    /// A step's folder, relative to the store; empty for the store itself.
    pub fn new(folder: &str) -> Self {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        Self { prefix }
    }

    /// The folder of a step below the checkpoint root.
    pub fn of_step(step: u64) -> Self {
        Self::new(&step_folder(step))
    }

    /// How keys of the step start.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A file of the step.
    pub fn file(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// `.metadata`.
    pub fn metadata(&self) -> String {
        self.file(METADATA)
    }

    pub(crate) fn records(&self, attempt: AttemptId) -> String {
        format!("{}{RECORDS}/{attempt}/", self.prefix)
    }

    pub(crate) fn record(&self, attempt: AttemptId, name: &str) -> String {
        format!("{}{RECORDS}/{attempt}/{name}", self.prefix)
    }

    pub(crate) fn of_rank(&self, attempt: AttemptId, what: &str, rank: u32) -> String {
        format!("{}{RECORDS}/{attempt}/{what}-{rank}", self.prefix)
    }

    pub(crate) fn readers(&self) -> String {
        format!("{}{RECORDS}/readers/", self.prefix)
    }

    /// What a key of this step is.
    pub(crate) fn place(&self, key: &str) -> Place {
        let Some(rest) = key.strip_prefix(&self.prefix) else { return Place::Foreign };
        if rest == METADATA {
            return Place::Metadata;
        }
        if let Some(record) = rest.strip_prefix(RECORDS).and_then(|rest| rest.strip_prefix('/')) {
            return match record.split_once('/') {
                Some(("readers", _)) => Place::Reader,
                Some((attempt, _)) => attempt.parse().map_or(Place::Foreign, Place::Record),
                None => Place::Foreign,
            };
        }
        attempt_of_file(rest).map_or(Place::Foreign, Place::File)
    }
}

/// The name of a data file of an attempt.
pub fn data_file(attempt: AttemptId, rank: u32, number: u32) -> String {
    format!("{attempt}_{rank}_{number}.distcp")
}

/// The name of the manifest that a committer of an attempt writes. The committer is part of it, so that two committers
/// never write one object.
pub fn manifest(attempt: AttemptId, committer: u32) -> String {
    format!("{MANIFEST_PREFIX}{attempt}_{committer}")
}

/// Which attempt a file of a step's folder belongs to, by its name.
pub fn attempt_of_file(name: &str) -> Option<AttemptId> {
    if name.contains('/') {
        return None;
    }
    let name = name.strip_prefix(MANIFEST_PREFIX).unwrap_or(name);
    name.split_once('_').and_then(|(attempt, _)| attempt.parse().ok())
}

/// The rank at the end of a record's name: `part-12` for `what` = `part`.
pub(crate) fn rank_of(name: &str, what: &str) -> Option<u32> {
    name.strip_prefix(what)?.strip_prefix('-')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::id::RunId;

    #[test]
    fn every_name_leads_back_to_its_attempt_and_others_to_none() {
        let id = AttemptId { run: RunId(7), save: 3 };
        let layout = Layout::of_step(12);
        let place = |name: &str| layout.place(&layout.file(name));
        assert_eq!(place(&data_file(id, 0, 1)), Place::File(id));
        assert_eq!(place(&manifest(id, 2)), Place::File(id));
        assert_eq!(place("00000007-3_0_rng.json"), Place::File(id));
        assert_eq!(layout.place(&layout.of_rank(id, "part", 9)), Place::Record(id));
        assert_eq!(layout.place(&layout.metadata()), Place::Metadata);
        assert_eq!(layout.place(&format!("{}00", layout.readers())), Place::Reader);
        for foreign in ["__0_0.distcp", "config.json", ".forebay/x/y", "sub/00000007-3_0_0.distcp"]
        {
            assert_eq!(place(foreign), Place::Foreign, "{foreign}");
        }
        assert_eq!(layout.place("step-1/.metadata"), Place::Foreign);
    }

    #[test]
    fn step_folders_have_one_spelling() {
        assert_eq!(step_of_folder("step-0"), Some(0));
        assert_eq!(step_of_folder(&step_folder(u64::MAX)), Some(u64::MAX));
        for bad in ["step-", "step-01", "step-+1", "step-1x", "steps-1", "step--1"] {
            assert_eq!(step_of_folder(bad), None, "{bad}");
        }
    }
}
