//! What must stay, as a remover sees it: read when it begins, and read again before each step goes.
//!
//! The order is what makes a mark safe. A remover announces the removal, and then reads the marks; who makes a mark
//! writes it, and then looks for an announcement ([`Marks::pin`]). So at least one of the two sees the other: the
//! remover takes its announcement back, or the other waits and is told that the step went. A mark's maker waits half a
//! minute for a remover, so marks that were read longer than [`FRESH`] ago are read anew: a remover of many steps would
//! go by what it read minutes ago.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_error::{Code, Error, Result};

use super::marks::{Marks, holds};
use super::root::Root;

/// How long marks are good for that were read: a sixth of the wait of those who make one.
const FRESH: Duration = Duration::from_secs(5);

/// See the module.
pub(crate) struct Keep {
    /// Which marks count.
    rule: Rule,
    /// What had them at the last reading, and when that was.
    kept: BTreeSet<u64>,
    read: Option<Duration>,
}

enum Rule {
    /// All: what is marked stays, and nobody needs to be told.
    Marked,
    /// Holds, and pins that are not among these steps': the caller has weighed those. `None` where pins could not be
    /// read when it began.
    Held(Option<BTreeSet<u64>>),
}

impl Keep {
    /// For retention. Errors: those of [`Marks::read`].
    pub(crate) fn marked(root: &Root) -> Result<Self> {
        let mut keep = Self { rule: Rule::Marked, kept: BTreeSet::new(), read: None };
        keep.look(root)?;
        Ok(keep)
    }

    /// For callers that decide by rules of their own. Errors: I/O.
    pub(crate) fn held(root: &Root) -> Result<Self> {
        let pins = match Marks::read(root) {
            Ok(marks) => Some(marks.pins.iter().map(|pin| pin.step).collect()),
            Err(error) if error.code() == Code::InvalidMetadata => None,
            Err(error) => return Err(error),
        };
        Ok(Self { rule: Rule::Held(pins), kept: BTreeSet::new(), read: None })
    }

    /// Whether a step was to stay at the last reading.
    pub(crate) fn had(&self, step: u64) -> bool {
        self.kept.contains(&step)
    }

    /// What was read so far was read before the announcements.
    pub(crate) fn forget(&mut self) {
        self.read = None;
    }

    /// Whether a step is to stay now. Errors: I/O, damaged pins; `already_exists` where the caller is to hear of it.
    pub(crate) fn stays(&mut self, root: &Root, step: u64) -> Result<bool> {
        let now = root.clock.now();
        if self.read.is_none_or(|read| now.saturating_sub(read) > FRESH) {
            self.look(root)?;
        }
        match (&self.rule, self.had(step)) {
            (_, false) => Ok(false),
            (Rule::Marked, true) => Ok(true),
            (Rule::Held(_), true) => {
                let what = format!("step {step} was pinned or held meanwhile: it stays");
                Err(Error::new(Code::AlreadyExists, what).at(root.store.name()))
            }
        }
    }

    fn look(&mut self, root: &Root) -> Result<()> {
        self.read = None;
        let now = root.clock.now();
        self.kept = match &self.rule {
            Rule::Marked => Marks::read(root)?.kept(),
            Rule::Held(None) => holds(root)?,
            Rule::Held(Some(known)) => {
                let marks = Marks::read(root)?;
                let pins = marks.pins.iter().map(|pin| pin.step);
                pins.filter(|step| !known.contains(step))
                    .chain(marks.holds.iter().copied())
                    .collect()
            }
        };
        self.read = Some(now);
        Ok(())
    }
}
