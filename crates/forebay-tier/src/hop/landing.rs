//! Where a file is written until it is whole.
//!
//! A folder shows a file from its first byte on, so there it is written under a name of its own and published. A bucket
//! shows an object when it is complete, and cannot rename: there it is written under its name. Which of the two a store
//! is, is seen by looking for an object that was created and not sealed.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_checkpoint::commit::{Adoption, Root};
use forebay_error::{Code, Error, Result};
use forebay_store::{DataObject, Expect, Published};

/// Most records of an attempt that are looked through.
const RECORDS_MAX: usize = 1 << 20;

/// See the module.
pub(super) struct Landing<'a> {
    to: &'a Root,
    adoption: &'a Adoption,
    /// How names of this process start.
    own: String,
    staged: bool,
    next: AtomicU64,
}

/// A file on its way.
pub(super) struct Ground {
    /// Where it is written.
    pub(super) key: String,
    pub(super) data: Box<dyn DataObject>,
}

impl<'a> Landing<'a> {
    /// Finds out what the store shows, and removes what this mover had under way when it was killed.
    pub(super) fn find(to: &'a Root, adoption: &'a Adoption, mover: u32) -> Result<Self> {
        let prefix = adoption.own_record("");
        let former = format!("data-{mover}-");
        let names = to.store.names(&prefix, RECORDS_MAX)?.into_iter().map(|(name, _)| name);
        let left = names.filter(|name| name.starts_with(&former));
        let keys: Vec<String> = left.map(|name| format!("{prefix}{name}")).collect();
        to.store.discard(&keys)?;
        let own = format!("{former}{:016x}", random());
        let key = adoption.own_record(&format!("{own}-probe"));
        let probe = to.store.create_data(&key, 1)?;
        let staged = exists(to, &key)?;
        drop(probe);
        if staged {
            to.store.remove(&key)?;
        }
        Ok(Self { to, adoption, own, staged, next: AtomicU64::new(0) })
    }

    /// Whether a file that has its name has also been read back, if it is to be.
    pub(super) fn proves(&self) -> bool {
        self.staged
    }

    /// Starts a file.
    pub(super) fn create(&self, name: &str, bytes: u64) -> Result<Ground> {
        let key = match self.staged {
            true => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                self.adoption.own_record(&format!("{}-{number}", self.own))
            }
            false => self.adoption.layout().file(name),
        };
        let data = self.to.store.create_data(&key, bytes)?;
        Ok(Ground { key, data })
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

/// Random bits that tell processes apart; no secret.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    hasher.write_u128(time.map_or(0, |time| time.as_nanos()));
    hasher.finish()
}

/// The error of a file that was taken away while it was copied, again and again.
pub(super) fn taken(to: &Root, key: &str) -> Error {
    let what = "what was being copied was taken away, more than once";
    let error = Error::new(Code::Fenced, what).at(format!("{}/{key}", to.store.name()));
    error.hint("is another mover of the same number at work?")
}
