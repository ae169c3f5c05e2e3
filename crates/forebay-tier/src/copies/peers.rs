//! Drives have names, and who has one says so.
//!
//! An announcement is a small record where all nodes see it, written anew again and again. It says how old it may get
//! by the store's own clock until its writer counts as gone, for now at least, and where to reach its agent; what is
//! reached there proves who it is by TLS, and nothing that is said here is believed beyond that.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use forebay_checkpoint::commit::Root;
use forebay_error::{Code, Error, Result};
use forebay_store::{NODE_OWN, random};
use serde::{Deserialize, Serialize};

/// Where announcements are.
const PEERS: &str = ".forebay/peers/";
/// What one is called there.
const TOLD: &str = "told";
/// Longest time after which somebody counts as gone, whatever is announced.
const GONE_MAX: Duration = Duration::from_secs(3600);
/// How old one is that is removed by whoever sees it.
const FORGOTTEN: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most bytes of one.
const BYTES_MAX: u64 = 4096;
/// Most that are looked at.
const PEERS_MAX: usize = 1 << 16;

/// The name of a drive: made once, at random, and never another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriveId(pub(super) u64);

impl DriveId {
    /// Its bits.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for DriveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for DriveId {
    type Err = Error;

    /// Errors: `usage` for what is not 16 hex digits.
    fn from_str(text: &str) -> Result<Self> {
        let is_digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        number.map(Self).ok_or_else(|| Error::new(Code::Usage, "the name of a drive has 16 digits"))
    }
}

/// What is said of a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The machine.
    pub host: String,
    /// What its agent calls the job.
    pub job: String,
    /// Where its agent is reached: `https://HOST:PORT`.
    pub url: String,
    /// Seconds after which it counts as gone, if this was not written anew. It is, four times in that time.
    pub gone_seconds: u64,
}

/// A drive that somebody has said to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub drive: DriveId,
    /// What is said of it.
    pub told: Announcement,
    /// How long ago, by the store's clock.
    pub age: Duration,
}

impl Peer {
    /// Whether it was heard of lately.
    pub fn is_alive(&self) -> bool {
        self.age < Duration::from_secs(self.told.gone_seconds).min(GONE_MAX)
    }
}

/// The name of the drive of a root on several nodes; it gets one here.
///
/// Errors: I/O; `invalid_metadata` where what is there is no name.
pub fn drive_id(root: &Root) -> Result<DriveId> {
    let key = format!("{NODE_OWN}drive");
    let read = || root.store.get(&key, BYTES_MAX);
    let bytes = match read()? {
        Some((bytes, _)) => bytes,
        None => {
            root.store.create(&key, DriveId(random()).to_string().as_bytes())?;
            let gone = || Error::new(Code::NotFound, "what was written is gone").at(place(root));
            read()?.ok_or_else(gone)?.0
        }
    };
    let text = std::str::from_utf8(&bytes).unwrap_or_default().trim();
    text.parse().map_err(|error: Error| {
        let what = "the file that names this drive does not";
        let error = Error::new(Code::InvalidMetadata, what).at(place(root)).with_source(error);
        error.hint("remove it: the drive gets another name then")
    })
}

fn place(root: &Root) -> String {
    format!("{}/{NODE_OWN}drive", root.store.name())
}

/// Says, from now on, who has a drive. Errors: I/O.
pub fn announce(root: &Root, drive: DriveId, told: &Announcement) -> Result<()> {
    let bytes = serde_json::to_vec(told).map_err(|error| {
        Error::new(Code::Internal, "cannot write an announcement").with_source(error)
    })?;
    root.store.put(&key_of(drive), &bytes)
}

/// Takes it back: nothing is to be expected of the drive any more. Errors: I/O.
pub fn withdraw(root: &Root, drive: DriveId) -> Result<()> {
    root.store.remove(&key_of(drive)).map(drop)
}

/// Each has a folder of its own, so that one can be looked at without the others.
fn key_of(drive: DriveId) -> String {
    format!("{PEERS}{drive}/{TOLD}")
}

/// What was announced of one drive. Errors: I/O.
pub fn peer(root: &Root, drive: DriveId) -> Result<Option<Peer>> {
    let key = key_of(drive);
    let listed = root.store.list(&format!("{PEERS}{drive}/"), PEERS_MAX)?;
    let Some(line) = listed.into_iter().find(|line| line.key == key) else { return Ok(None) };
    Ok(told(root, drive)?.map(|told| Peer { drive, told, age: line.age.0 }))
}

/// What is announced; none where it is not readable as one, which must not hide what others say.
fn told(root: &Root, drive: DriveId) -> Result<Option<Announcement>> {
    let bytes = match root.store.get(&key_of(drive), BYTES_MAX) {
        Ok(Some((bytes, _))) => bytes,
        Ok(None) => return Ok(None),
        Err(error) if error.code() == Code::Unsupported => {
            tracing::warn!(%drive, %error, "no announcement");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let read = serde_json::from_slice(&bytes);
    let read = read.inspect_err(|error| tracing::warn!(%drive, %error, "no announcement"));
    Ok(read.ok())
}

/// Looks at all that is announced, again and again. What is said of a drive is read once, and once more where somebody
/// asks for that: of many nodes each would else read what all of them say.
#[derive(Default)]
pub struct Peers {
    known: BTreeMap<DriveId, Announcement>,
}

impl Peers {
    /// All drives, by their names; what is said of the `doubted` is read anew. What is a week old is removed.
    ///
    /// Errors: I/O.
    pub fn look(&mut self, root: &Root, doubted: &BTreeSet<DriveId>) -> Result<Vec<Peer>> {
        let mut found = Vec::new();
        for line in root.store.list(PEERS, PEERS_MAX)? {
            let name = line.key.strip_prefix(PEERS).and_then(|key| key.strip_suffix(TOLD));
            let name = name.and_then(|name| name.strip_suffix('/')).unwrap_or_default();
            let Ok(drive) = name.parse::<DriveId>() else { continue };
            if line.age.0 >= FORGOTTEN {
                root.store.remove(&line.key)?;
                continue;
            }
            let known = self.known.get(&drive).filter(|_| !doubted.contains(&drive));
            let told = match known {
                Some(told) => Some(told.clone()),
                None => told(root, drive)?,
            };
            found.extend(told.map(|told| Peer { drive, told, age: line.age.0 }));
        }
        self.known = found.iter().map(|peer| (peer.drive, peer.told.clone())).collect();
        Ok(found)
    }
}
