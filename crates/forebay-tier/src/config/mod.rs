//! `forebay.toml`: the tiers, how steps are moved between them, and the agent.
//!
//! ```toml
//! [[tier]]
//! name = "local"
//! place = "/nvme/run7"
//! capacity = "2 TB"
//! keep_last = 2
//!
//! [[tier]]
//! name = "bucket"
//! place = "s3://archive/run7"
//! takes = "every 1000"
//! write_limit = "500 MB/s"
//! [tier.store]
//! region = "eu-central-1"
//!
//! [tiers]
//! backlog = "wait"
//! audit_log = "audit.log"
//! ```
//!
//! A value counts from the command line (`tier.local.capacity=1TB`) before a variable (`FOREBAY_TIER_LOCAL_CAPACITY`)
//! before the file before the default; [`Config::settings`] says for each which it was. Keys that are not known, and
//! variables that begin with `FOREBAY_TIER` and stand for none, are errors: a limit that is misspelled must not be no
//! limit. Other variables that begin with `FOREBAY_` may be of something else (Kubernetes makes some that begin with
//! `FOREBAY_AGENT_` for a service of that name) and are left alone. No key is for a secret: files of tokens and keys
//! are named, credentials of buckets come from their usual chain.
//!
//! `file` takes the text apart, `section` reads one table, `value` knows the spellings.

mod file;
mod near;
mod section;
mod setting;
mod store;
mod value;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::{StoreSettings, local_path, split_url};

pub use file::{CONFIG_VARIABLE, find};
use file::{Tables, TierTable};
use near::nearest;
use section::{Reading, Section};
pub use setting::{Provenance, Setting};

use crate::hop::HopOptions;
use crate::policy::{Backlog, Takes};

/// Most copies of a file.
const COPIES_MAX: u64 = 8;
/// See [`TierConfig::copies_gone`].
const COPIES_GONE: Duration = Duration::from_secs(120);

/// All of it.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file, where there is one.
    pub file: Option<PathBuf>,
    /// The nearest first.
    pub tiers: Vec<TierConfig>,
    /// `[tiers]`.
    pub moving: Moving,
    /// `[agent]`.
    pub agent: AgentConfig,
    /// Every value, as it counts and from where.
    pub settings: Vec<Setting>,
}

/// A `[[tier]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct TierConfig {
    /// What people call it: letters, digits, `-` and `_`.
    pub name: String,
    /// A path or a URL, of the folder of steps.
    pub place: String,
    /// Of the first tier, where `place` is on the drive of each node: a place that all nodes share, for records. See
    /// [`forebay_store::SplitStore`].
    pub records: Option<String>,
    /// Of the first tier, where it is on the drives of nodes and agents move what is there: copies of each file on
    /// other nodes' drives. See [`crate::copies`].
    pub copies: u64,
    /// How far apart in the ring of nodes.
    pub copies_jump: u64,
    /// How long a node may not be heard of until others bring what they have of it to the next tier.
    pub copies_gone: Duration,
    /// Most bytes that may be there; what the file system has room for where `None`.
    pub capacity: Option<u64>,
    /// Keep the last so many. Where nothing is said about keeping, all stay.
    pub keep_last: Option<u64>,
    /// And those that this divides.
    pub keep_every: Option<NonZeroU64>,
    /// And those that are younger.
    pub keep_within: Option<Duration>,
    /// Which steps come by themselves.
    pub takes: Takes,
    /// Bytes a second out of it.
    pub read_limit: Option<NonZeroU64>,
    /// Bytes a second into it.
    pub write_limit: Option<NonZeroU64>,
    /// `[tier.store]`: how a bucket is reached.
    pub store: StoreSettings,
}

/// `[tiers]`: how steps are moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moving {
    /// What a save does for which the first tier has no room.
    pub backlog: Backlog,
    /// The file of the audit log; none is written where `None`.
    pub audit_log: Option<PathBuf>,
    /// How often tiers are looked at.
    pub look_every: Duration,
    /// Bytes of a part: what passes the limits at once.
    pub part_bytes: u64,
    /// Files of a step at a time.
    pub files_at_once: usize,
    /// Steps at a time.
    pub transfers_at_once: usize,
    /// How the disk treats threads that move steps.
    pub io_priority: IoPriority,
    /// How long data stay after their step is no commit any more, for readers without leases. What nobody goes on with
    /// stays for fifteen times that.
    pub grace: Duration,
}

/// A class of the kernel's I/O scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoPriority {
    /// Only when nobody else wants the disk.
    Idle,
    /// With everybody else, and last of those.
    BestEffort,
    /// As the process has it.
    Unchanged,
}

/// `[agent]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// The Unix socket for processes of this machine.
    pub socket: PathBuf,
    /// Users, by number, who may use the socket besides root and the agent's own.
    pub socket_users: Vec<u32>,
    /// `HOST:PORT` for others; nobody listens there where `None`.
    pub listen: Option<String>,
    /// A file with the token that lets others look.
    pub token_file: Option<PathBuf>,
    /// PEM file of the certificate chain.
    pub tls_certificate: Option<PathBuf>,
    /// PEM file of its key.
    pub tls_key: Option<PathBuf>,
    /// A file with the token that lets others act.
    pub action_token_file: Option<PathBuf>,
    /// A file with the token by which agents know each other.
    pub peer_token_file: Option<PathBuf>,
    /// Where other agents reach this one; by its host's name and the port of `listen` where `None`.
    pub peer_url: Option<String>,
    /// PEM file of those who vouch for other agents, and nobody else does; whom the machine trusts where `None`.
    pub peer_ca_file: Option<PathBuf>,
    /// Where traces go.
    pub otlp_endpoint: Option<String>,
    /// Most bytes of staged saves that are kept for processes; half of the machine's memory where `None`.
    pub staged_limit: Option<u64>,
}

/// What is beside the file.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// Variables of the environment by name; only those that begin with `FOREBAY_` count.
    pub variables: BTreeMap<String, String>,
    /// Values of the command line, by full key.
    pub flags: BTreeMap<String, String>,
}

impl Beside {
    /// The environment of this process, and `KEY=VALUE`s of the command line. Errors: `usage` for what has no `=`.
    pub fn of_process<'a>(flags: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let pair = |flag: &str| {
            let (key, value) = flag.split_once('=').ok_or_else(|| {
                let what = format!("`{flag}` is not KEY=VALUE");
                Error::new(Code::Usage, what).hint("as in `tiers.look_every=1s`")
            })?;
            Ok((key.trim().to_owned(), value.trim().to_owned()))
        };
        let flags = flags.into_iter().map(pair).collect::<Result<_>>()?;
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("FOREBAY_"))?;
            Some((name, value.into_string().ok().filter(|value| !value.is_empty())?))
        });
        Ok(Self { variables: variables.collect(), flags })
    }
}

impl Config {
    /// Reads the file that counts ([`find`]) and what goes before it. Without a file there are no tiers.
    ///
    /// Errors: `usage`, naming file, line and key, or the variable; `not_found` for a file that was named; I/O.
    pub fn load(named: Option<&Path>, beside: &Beside) -> Result<Self> {
        let file = find(named)?;
        let text = file.as_deref().map(file::read).transpose()?.unwrap_or_default();
        let name = file.clone().unwrap_or_else(|| PathBuf::from("forebay.toml"));
        let config = Self::from_text(&text, &name, beside)?;
        Ok(Self { file, ..config })
    }

    /// The same from text; `file` is what errors call it, and paths count from its folder.
    pub fn from_text(text: &str, file: &Path, beside: &Beside) -> Result<Self> {
        let tables = file::parse(text, file)?;
        let mut reading = Reading {
            file,
            variables: &beside.variables,
            flags: &beside.flags,
            asked: [CONFIG_VARIABLE.to_owned()].into(),
            settings: Vec::new(),
        };
        let Tables { tiers, moving, agent } = tables;
        let tiers = tiers_of(&mut reading, tiers)?;
        let moving = Moving::read(Section::new(&mut reading, "tiers".to_owned(), moving))?;
        let agent = AgentConfig::read(Section::new(&mut reading, "agent".to_owned(), agent))?;
        check_asked(&reading)?;
        Ok(Self { file: Some(file.to_owned()), tiers, moving, agent, settings: reading.settings })
    }

    /// The number of the tier of that name. Errors: `usage`, naming the nearest.
    pub fn tier(&self, name: &str) -> Result<usize> {
        let found = self.tiers.iter().position(|tier| tier.name == name);
        found.ok_or_else(|| {
            let names = || self.tiers.iter().map(|tier| tier.name.as_str());
            let error = Error::new(Code::Usage, format!("there is no tier `{name}`"));
            match nearest(name, names()) {
                Some(near) => error.hint(format!("is `{near}` meant?")),
                None => error.hint(format!("there are {}", names().collect::<Vec<_>>().join(", "))),
            }
        })
    }
}

/// Variables and flags that look like keys and are none.
fn check_asked(reading: &Reading<'_>) -> Result<()> {
    let is_ours = |name: &str| name.starts_with("FOREBAY_TIER");
    let variables = reading.variables.keys().filter(|name| is_ours(name));
    let mut others =
        variables.chain(reading.flags.keys()).filter(|name| !reading.asked.contains(*name));
    let Some(other) = others.next() else { return Ok(()) };
    let error = Error::new(Code::Usage, format!("`{other}` stands for no key"));
    Err(match nearest(other, reading.asked.iter().map(String::as_str)) {
        Some(near) => error.hint(format!("is `{near}` meant?")),
        None => error.hint("`forebay config` lists all keys"),
    })
}

fn tiers_of(reading: &mut Reading<'_>, tables: Vec<TierTable>) -> Result<Vec<TierConfig>> {
    let mut tiers: Vec<TierConfig> = Vec::new();
    for (number, mut table) in tables.into_iter().enumerate() {
        let place = format!("{}:{}, tier {number}", reading.file.display(), table.line);
        let Some(section::Raw::Text(name)) = table.entries.get("name").map(|entry| &entry.raw)
        else {
            let what = "a tier has no `name`";
            return Err(Error::new(Code::Usage, what).at(place).hint("name = \"local\""));
        };
        let name = name.clone();
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if !(1..=32).contains(&name.len()) || !name.chars().all(is_word) {
            let what = "a tier's `name` is 1 to 32 letters, digits, `-` and `_`";
            return Err(Error::new(Code::Usage, what).at(place));
        }
        if tiers.iter().any(|other| other.name.eq_ignore_ascii_case(&name)) {
            return Err(Error::new(Code::Usage, format!("two tiers are called `{name}`")).at(place));
        }
        let path = format!("tier.{name}");
        let store = std::mem::take(&mut table.store);
        let mut section = Section::new(reading, path.clone(), table.entries);
        let mut tier = TierConfig::read(&mut section, name, &place)?;
        section.finish()?;
        check_records(&tier, tiers.len()).map_err(|error| error.at(&place))?;
        if tier.copies > 0 && !tiers.is_empty() {
            let what = format!("tier `{}` has `copies`, and is not the first", tier.name);
            let hint = "`copies` is for drives that each node has its own of, where saves go";
            return Err(Error::new(Code::Usage, what).at(&place).hint(hint));
        }
        tier.store = store::read(Section::new(reading, format!("{path}.store"), store))?;
        tiers.push(tier);
    }
    let is_split = tiers.first().is_some_and(|tier| tier.records.is_some());
    if is_split && !tiers.iter().skip(1).any(|tier| tier.takes == Takes::All) {
        let what = "the first tier has `records`, and no other takes all steps";
        let error = Error::new(Code::Usage, what).at(reading.file.display());
        return Err(error.hint("a step on drives can be restored once another tier has it"));
    }
    Ok(tiers)
}

/// Only what is saved to is on the drives of nodes.
fn check_records(tier: &TierConfig, number: usize) -> Result<()> {
    if tier.records.is_none() {
        return Ok(());
    }
    if number > 0 {
        let what = format!("tier `{}` has `records`, and is not the first", tier.name);
        let hint = "`records` is for drives that each node has its own of, where saves go";
        return Err(Error::new(Code::Usage, what).hint(hint));
    }
    match local_path(&tier.place)? {
        Some(path) if path.is_absolute() => Ok(()),
        _ => {
            let what = format!("tier `{}` has `records`, and its place is no folder", tier.name);
            Err(Error::new(Code::Usage, what).hint("an absolute path is needed"))
        }
    }
}

impl TierConfig {
    fn read(section: &mut Section<'_, '_>, name: String, place: &str) -> Result<Self> {
        // It was looked at before: the other names of keys begin with it.
        section.text("name")?;
        let missing = || Error::new(Code::Usage, "a tier has no `place`").at(place);
        Ok(Self {
            name,
            place: section.place("place")?.ok_or_else(missing)?,
            records: section.place("records")?,
            copies: section.number("copies", Some(0), 0..=COPIES_MAX)?.unwrap_or(0),
            copies_jump: section.number("copies_jump", Some(1), 1..=1 << 20)?.unwrap_or(1),
            copies_gone: section
                .time("copies_gone", Some(COPIES_GONE))?
                .unwrap_or(COPIES_GONE)
                .clamp(Duration::from_secs(4), Duration::from_secs(3600)),
            capacity: section.size("capacity", None)?,
            keep_last: section.number("keep_last", None, 1..=1_000_000_000)?,
            keep_every: section.number("keep_every", None, 1..=u64::MAX)?.and_then(NonZeroU64::new),
            keep_within: section.time("keep_within", None)?,
            takes: section.word("takes", "all", value::takes)?.unwrap_or(Takes::All),
            read_limit: section.rate("read_limit")?,
            write_limit: section.rate("write_limit")?,
            store: StoreSettings::default(),
        })
    }

    /// What is opened: its place, with the place of records where that is another one.
    pub fn url(&self) -> String {
        match &self.records {
            Some(records) => split_url(records, &self.place, false),
            None => self.place.clone(),
        }
    }

    /// Whether anything is said about what stays.
    pub fn keeps_some(&self) -> bool {
        self.keep_last.is_some() || self.keep_every.is_some() || self.keep_within.is_some()
    }
}

impl Default for Moving {
    fn default() -> Self {
        let hop = HopOptions::default();
        Self {
            backlog: Backlog::Wait,
            audit_log: None,
            look_every: Duration::from_secs(2),
            part_bytes: hop.part_bytes,
            files_at_once: hop.files_at_once,
            transfers_at_once: 2,
            io_priority: IoPriority::BestEffort,
            grace: Duration::from_secs(60),
        }
    }
}

impl Moving {
    fn read(mut section: Section<'_, '_>) -> Result<Self> {
        let default = Self::default();
        let backlog = |text: &str| match text.trim() {
            "wait" => Ok(Backlog::Wait),
            "skip" => Ok(Backlog::Skip),
            "straight" => Ok(Backlog::Straight),
            _ => Err("not \"wait\", \"skip\" or \"straight\"".to_owned()),
        };
        let priority = |text: &str| match text.trim() {
            "idle" => Ok(IoPriority::Idle),
            "best-effort" => Ok(IoPriority::BestEffort),
            "none" => Ok(IoPriority::Unchanged),
            _ => Err("not \"idle\", \"best-effort\" or \"none\"".to_owned()),
        };
        let files = section.number("files_at_once", Some(default.files_at_once as u64), 1..=64)?;
        let transfers =
            section.number("transfers_at_once", Some(default.transfers_at_once as u64), 1..=16)?;
        let read = Self {
            backlog: section.word("backlog", "wait", backlog)?.unwrap_or(default.backlog),
            audit_log: section.path("audit_log", None)?,
            look_every: section
                .time("look_every", Some(default.look_every))?
                .unwrap_or(default.look_every)
                .clamp(Duration::from_millis(10), Duration::from_secs(3600)),
            part_bytes: section
                .size("part_bytes", Some(default.part_bytes))?
                .unwrap_or(default.part_bytes)
                .clamp(1 << 16, 256 << 20),
            files_at_once: files.map_or(default.files_at_once, |number| number as usize),
            transfers_at_once: transfers
                .map_or(default.transfers_at_once, |number| number as usize),
            io_priority: section
                .word("io_priority", "best-effort", priority)?
                .unwrap_or(default.io_priority),
            grace: section.time("grace", Some(default.grace))?.unwrap_or(default.grace),
        };
        section.finish()?;
        Ok(read)
    }
}

/// `1000, 1001`
fn users(text: &str) -> Result<Vec<u32>, String> {
    let numbers = text.split(',').map(str::trim).filter(|number| !number.is_empty());
    let numbers: Result<_, _> = numbers.map(str::parse).collect();
    numbers.map_err(|_| "not numbers of users, as in \"1000, 1001\"".to_owned())
}

impl AgentConfig {
    fn read(mut section: Section<'_, '_>) -> Result<Self> {
        let socket = Self::default().socket;
        let read = Self {
            socket: section.path("socket", Some(&socket))?.unwrap_or(socket),
            socket_users: section.word("socket_users", "", users)?.unwrap_or_default(),
            listen: section.text("listen")?,
            token_file: section.path("token_file", None)?,
            tls_certificate: section.path("tls_certificate", None)?,
            tls_key: section.path("tls_key", None)?,
            action_token_file: section.path("action_token_file", None)?,
            peer_token_file: section.path("peer_token_file", None)?,
            peer_url: section.text("peer_url")?,
            peer_ca_file: section.path("peer_ca_file", None)?,
            otlp_endpoint: section.text("otlp_endpoint")?,
            staged_limit: section.size("staged_limit", None)?,
        };
        section.finish()?;
        Ok(read)
    }
}

impl Default for AgentConfig {
    /// The socket below `XDG_RUNTIME_DIR`, else in `/run/forebay`; nothing else.
    fn default() -> Self {
        let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
        let folder =
            own.map_or(PathBuf::from("/run/forebay"), |own| Path::new(&own).join("forebay"));
        Self {
            socket: folder.join("agent.sock"),
            socket_users: Vec::new(),
            listen: None,
            token_file: None,
            tls_certificate: None,
            tls_key: None,
            action_token_file: None,
            peer_token_file: None,
            peer_url: None,
            peer_ca_file: None,
            otlp_endpoint: None,
            staged_limit: None,
        }
    }
}

#[cfg(test)]
mod tests;
