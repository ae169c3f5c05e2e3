//! Where a file is written until it is whole.
//!
//! A folder shows a file from its first byte on, so there it is written under a name of its own and published. A bucket
//! shows an object when it is complete, and cannot rename: there it is written under its name. Which of the two a store
//! is, is seen by looking for an object that was created and not sealed.
//!
//! # Going on within a file
//!
//! The name of a file on its way follows from the mover's number, the machine, its start, and the file: so a mover
//! that was killed finds what it had under way when it is started again, and goes on with it
//! ([`resume_data`](forebay_store::Store::resume_data)). Nothing that is there is believed: a part counts only if the
//! store's own bytes, or its own checksum of them, are those that were just read from the source; the sum over all of
//! them must be the manifest's, as ever; and where files are read back, this one is too, from its first byte.
//!
//! In a folder the name is only ever used by this start of this machine, whose kernel knows who holds a file's lock,
//! and frees it when the holder dies. The lock is held until the file has its name or is given up, so nobody writes to
//! a file that is being published, nor to one that was: that has two names for an instant, and one other afterwards.
//! What another machine or another start left is removed when nothing was written to it for a minute, as is what was
//! not to be gone on with: where another mover of the same number lives, or there are no locks, a file gets a name of
//! chance, and both go on: one of the two copies gets its name. After a failed `seal` a file is
//! removed: the system may have dropped its bytes.
//!
//! In a bucket the name is the file's own, and its upload is looked for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{Adoption, Root};
use forebay_error::{Code, Error, Result};
use forebay_store::{DataObject, Expect, Published, random};

/// Most records of an attempt that are looked through.
const RECORDS_MAX: usize = 1 << 20;
/// What was written to within that time has a mover that lives, maybe: a limit or a pause holds none up for longer
/// between two parts, as a rule.
const ALIVE: Duration = Duration::from_secs(60);

/// See the module.
pub(super) struct Landing<'a> {
    to: &'a Root,
    adoption: &'a Adoption,
    /// How names of this mover start that are not gone on with.
    once: String,
    /// And those that are.
    again: String,
    staged: bool,
    next: AtomicU64,
}

/// A file on its way.
pub(super) struct Ground {
    /// Where it is written.
    pub(super) key: String,
    pub(super) data: Box<dyn DataObject>,
    /// Whether who comes later can go on with it.
    pub(super) again: bool,
}

impl<'a> Landing<'a> {
    /// Finds out what the store shows, and removes what this mover had under way when it was killed, but for what it
    /// can go on with.
    pub(super) fn find(to: &'a Root, adoption: &'a Adoption, mover: u32) -> Result<Self> {
        let prefix = adoption.own_record("");
        let former = format!("data-{mover}-");
        let again = format!("{former}{}-", start_of_machine());
        let listed = to.store.list_here(&prefix, RECORDS_MAX)?.into_iter();
        let left = listed.filter(|line| {
            let name = line.key.strip_prefix(&prefix).unwrap_or_default();
            let is_left = name.starts_with(&former) && !name.starts_with(&again);
            // Another mover of the number may be at work, say of a command beside the job's.
            is_left && line.age.0 >= ALIVE
        });
        let keys: Vec<String> = left.map(|line| line.key).collect();
        to.store.discard(&keys)?;
        let once = format!("{former}x{:016x}", random());
        let key = adoption.own_record(&format!("{once}-probe"));
        let probe = to.store.create_data(&key, 1)?;
        let staged = exists(to, &key)?;
        drop(probe);
        if staged {
            to.store.remove(&key)?;
        }
        Ok(Self { to, adoption, once, again, staged, next: AtomicU64::new(0) })
    }

    /// Whether a file that has its name has also been read back, if it is to be.
    pub(super) fn proves(&self) -> bool {
        self.staged
    }

    /// Starts a file, or goes on with it.
    pub(super) fn create(&self, name: &str, bytes: u64) -> Result<Ground> {
        if !self.staged {
            let key = self.adoption.layout().file(name);
            let data = self.to.store.resume_data(&key, bytes)?;
            return Ok(Ground { key, data, again: true });
        }
        let key = self.adoption.own_record(&format!("{}{:016x}", self.again, hash(name)));
        match self.to.store.resume_data(&key, bytes) {
            Ok(data) => return Ok(Ground { key, data, again: true }),
            Err(error) if matches!(error.code(), Code::AlreadyExists | Code::Unsupported) => {
                tracing::debug!(%error, "a file is begun anew");
            }
            Err(error) => return Err(error),
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let key = self.adoption.own_record(&format!("{}-{number}", self.once));
        let data = self.to.store.create_data(&key, bytes)?;
        Ok(Ground { key, data, again: false })
    }

    /// A file that is whole and checked gets its name; false where somebody has taken it away.
    pub(super) fn land(&self, key: &str, name: &str) -> Result<bool> {
        if !self.staged {
            return Ok(true);
        }
        let to = self.adoption.layout().file(name);
        match self.to.store.publish(key, &to, &Expect::Absent) {
            Ok(Published::Done { .. }) => Ok(true),
            // Somebody else's copy, which is as good.
            Ok(Published::Lost) => self.to.store.remove(key).map(|_| true),
            Ok(Published::Withdrawn) => exists(self.to, &to),
            Err(error) if error.code() == Code::NotDurable => Err(error),
            Err(error) => match exists(self.to, &to)? {
                true => Ok(true),
                false => Err(error),
            },
        }
    }

    /// What is at `key` is not to be kept.
    pub(super) fn give_up(&self, key: &str) {
        if let Err(error) = self.to.store.remove(key) {
            tracing::debug!(%error, "what was being copied stays until it is collected");
        }
    }
}

fn exists(to: &Root, key: &str) -> Result<bool> {
    match to.store.open_data(key) {
        Ok(_) => Ok(true),
        Err(error) if error.code() == Code::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// What no other machine has, nor this one after its next start; where that is not told, what nobody has.
fn start_of_machine() -> String {
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = read.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    if digits.len() == 16 { digits } else { format!("{:016x}", random()) }
}

/// FNV-1a. Two files of one hash would only be in each other's way.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The error of a file that was taken away while it was copied, again and again.
pub(super) fn taken(to: &Root, key: &str) -> Error {
    let what = "what was being copied was taken away, more than once";
    let error = Error::new(Code::Fenced, what).at(format!("{}/{key}", to.store.name()));
    error.hint("is another mover of the same number at work?")
}
