//! What people and programs see of tiers: plain data, the same in `forebay tier status --json`, in the agent's API and
//! on its page. Names of fields are stable; new ones may come.

use serde::{Deserialize, Serialize};

/// All of it at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Host and process that answers.
    pub who: String,
    /// Seconds since it started.
    pub up_seconds: f64,
    /// The nearest first.
    pub tiers: Vec<TierStatus>,
    /// Every step that any tier has, in the order of commits, the newest last.
    pub steps: Vec<StepStatus>,
    /// Transfers under way.
    pub transfers: Vec<Transfer>,
    /// Steps that wait to be moved.
    pub waiting: u64,
    /// The last errors, the newest last; at most [`ERRORS_MAX`].
    pub errors: Vec<Trouble>,
    /// Copies of what is on this node's drive, where agents make some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<CopiesStatus>,
}

/// Errors that are kept to be shown.
pub const ERRORS_MAX: usize = 50;

/// One tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TierStatus {
    /// As configured.
    pub name: String,
    /// Path or URL.
    pub place: String,
    /// Whether it answers.
    pub health: Health,
    /// Bytes of checkpoints there.
    pub used_bytes: u64,
    /// Most bytes that may be there, where there is a limit.
    pub capacity_bytes: Option<u64>,
    /// Committed steps there.
    pub committed: u64,
    /// Bytes read from it and written to it since the start.
    pub read_bytes: u64,
    /// See `read_bytes`.
    pub written_bytes: u64,
    /// Bytes a second over the last ten seconds.
    pub read_rate: f64,
    /// See `read_rate`.
    pub write_rate: f64,
    /// Caps in bytes a second, where there are any.
    pub read_cap: Option<u64>,
    /// See `read_cap`.
    pub write_cap: Option<u64>,
    /// Whether somebody paused it.
    pub paused: bool,
    /// What the store was found to honour, in words, and what is wrong with it.
    pub notes: Vec<String>,
    /// Bytes that its file system has room for, where it is a folder.
    #[serde(default)]
    pub free_bytes: Option<u64>,
}

/// Whether a tier can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Not asked yet.
    #[default]
    Unknown,
    /// It answers.
    Ok,
    /// It answers, with errors in the last minute; what failed is tried again.
    Troubled,
    /// There is no room for what is to come.
    Full,
    /// It can be read and not be written.
    ReadOnly,
    /// It does not answer, or refuses.
    Down,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepStatus {
    /// Its number.
    pub step: u64,
    /// Which commit of it.
    pub attempt: String,
    /// Its bytes.
    pub bytes: u64,
    /// Seconds since it was committed, by the clock of the nearest store that has it.
    pub age_seconds: f64,
    /// Names that people gave it.
    pub pins: Vec<String>,
    /// Whether it must not be removed anywhere.
    pub held: bool,
    /// One for each tier.
    pub copies: Vec<CopyState>,
}

/// A step on a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyState {
    /// Not there.
    #[default]
    Absent,
    /// It will come.
    Waiting,
    /// It is on its way.
    Moving,
    /// The parts of some nodes are there.
    Partial,
    /// Committed there.
    Committed,
    /// On the drives of its nodes, this node's part here: it is restored once they have brought it to the next tier.
    OnNodes,
    /// The same, and this node's part of it is on the drives of as many other nodes as it is to be.
    Copied,
    /// Another commit of the same step is there.
    Other,
}

/// Copies of what is on the drive of a node, on those of others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopiesStatus {
    /// The name of this node's drive.
    pub drive: String,
    /// How many copies there are to be of each of its files.
    pub wanted: u64,
    /// Steps that are in no one place yet, and of which this node has files.
    pub steps: Vec<CopyStep>,
    /// The other nodes whose drives are known.
    pub nodes: Vec<CopyNode>,
    /// Files of other nodes that are copied here.
    pub held_files: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Bytes of copies sent since the start.
    pub sent_bytes: u64,
    /// Bytes of copies taken since the start.
    pub received_bytes: u64,
    /// Copies that failed and are tried again, since the start.
    pub failures: u64,
    /// What is wrong with this drive itself, in a line.
    pub error: Option<String>,
}

/// A step that is to be copied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopyStep {
    /// Which.
    pub step: u64,
    /// Files of this node's own.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Hosts whose drives have all of them.
    pub on: Vec<String>,
}

/// Another node whose drive is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CopyNode {
    /// The machine.
    pub host: String,
    /// The name of its drive.
    pub drive: String,
    /// Where its agent is reached.
    pub url: String,
    /// Whether it was heard of in the last two minutes.
    pub is_alive: bool,
    /// What went wrong last with it, in a line.
    pub error: Option<String>,
}

/// A step under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Which.
    pub step: u64,
    /// Number of the tier it comes from.
    pub from: usize,
    /// And of the tier it goes to.
    pub to: usize,
    /// `restore`, `newest` or `archive`.
    pub priority: String,
    /// Bytes that are done, those found there included.
    pub done_bytes: u64,
    /// Of so many.
    pub total_bytes: u64,
    /// Bytes a second, over the last seconds.
    pub rate: f64,
    /// Seconds that are left at that rate, where it is known.
    pub left_seconds: Option<f64>,
    /// Tries before this one.
    pub tries: u32,
}

/// Something that went wrong.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trouble {
    /// Seconds since 1970, by this host's clock.
    pub at: f64,
    /// Number of the tier, where it is one's.
    pub tier: Option<usize>,
    /// The step, where it is one's.
    pub step: Option<u64>,
    /// The error's code.
    pub code: String,
    /// The error in a line, without secrets.
    pub what: String,
    /// When it is tried again: seconds from then; `None` where it is not.
    pub again_seconds: Option<f64>,
}
