//! The interface of stores.

use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::Result;

use crate::object::{Abilities, DataObject, Expect, Listed, Published, Version};

/// A place that holds objects under keys: relative paths of one or more names with `/` between, none of them empty,
/// `.` or `..`.
///
/// Every call may block and may be made from any thread. Errors carry the codes of I/O (`not_found`, `no_space`,
/// `permission_denied`, `io`, `timeout`) and name store and key. A call that failed may have happened all the same (a
/// lost reply): callers read again before they draw conclusions. `not_durable` says that it did happen, and that the
/// store could not make it durable: whoever finds the change then must not build on it.
pub trait Store: Send + Sync {
    /// What errors and reports call it: a path or a URL.
    fn name(&self) -> String;

    /// What it was found to honour when it was opened.
    fn abilities(&self) -> Abilities;

    /// Forgets what it was found to honour, so that it is found out again at the next need: what was asked once may
    /// have gone wrong.
    fn forget_abilities(&self) {}

    /// Whether each call is a round trip of milliseconds, so that many small ones are to be avoided.
    fn is_remote(&self) -> bool {
        false
    }

    /// Whether the data of all who write to it are seen from here. Where false, what is missing may be on another
    /// node's drive.
    fn sees_all(&self) -> bool {
        true
    }

    /// The folder that it lies in, as a store, and its own name there: for what is said of a checkpoint beside it.
    /// `None` where there is no such folder, or it is not to be reached from here. Errors: I/O.
    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        Ok(None)
    }

    /// A small object and its version; `None` where there is none. More than `max_bytes` is `unsupported`, unread.
    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>>;

    /// Creates a small object, durably and in one step; false, and nothing changed, where the key is taken.
    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool>;

    /// Makes a small object under a key whatever is there, durably and in one step: a reader finds the old bytes or
    /// the new ones.
    fn put(&self, key: &str, bytes: &[u8]) -> Result<()>;

    /// The objects whose key starts with `prefix`, which ends in `/` or is empty, in the order of their keys; those in
    /// folders below too. More than `limit` is `unsupported`.
    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>>;

    /// Those of them that are directly below the prefix, without what is inside of folders. More than `limit` is
    /// `unsupported`.
    fn list_here(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        let mut found = self.list(prefix, limit)?;
        found.retain(|object| object.key.strip_prefix(prefix).is_some_and(|n| !n.contains('/')));
        Ok(found)
    }

    /// The names directly below a prefix, without what is inside of folders: (name, whether it is a folder). Links to
    /// folders are not among them.
    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>>;

    /// Removes an object; false where there was none. Where a folder becomes empty it may go too.
    fn remove(&self, key: &str) -> Result<bool>;

    /// Removes objects that nobody needs any more; those that are not there are passed over. Not forced to the disk:
    /// after a loss of power some may be there again. Errors: the first; the others were tried all the same.
    fn discard(&self, keys: &[String]) -> Result<()> {
        let mut first = Ok(());
        for key in keys {
            first = first.and(self.remove(key).map(drop));
        }
        first
    }

    /// Objects below a prefix that somebody began to write and did not seal, and that no listing shows: uploads to a
    /// bucket. One line each, a key may come twice; `bytes` is 0, the age since it was begun. Nothing where there is no
    /// such thing, or where it cannot be listed. More than `limit` is `unsupported`.
    fn unfinished(&self, _prefix: &str, _limit: usize) -> Result<Vec<Listed>> {
        Ok(Vec::new())
    }

    /// Has the store forget what was begun under a key, and its parts, which nobody can go on with; how many there
    /// were. Whoever still writes one of them fails.
    fn forget_unfinished(&self, _key: &str) -> Result<u64> {
        Ok(0)
    }

    /// Makes what was put at `staged` the object at `to`, in one step and durably: the one call that makes a
    /// checkpoint visible. Whoever loses changes nothing. A reply that got lost is looked up: the destination is read
    /// again, and `Done` is said if it holds what was staged. After `Done` there is nothing at `staged`; where several
    /// publish the same staged object at once, more than one may be told `Done`.
    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published>;

    /// Starts a data object of `bytes` bytes under a key that nobody else uses; sets that much room aside where the
    /// store can, and fails with `no_space` if it is not to be had.
    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>>;

    /// The same, or goes on with what a writer began under the key and did not seal, because it was killed or gave up:
    /// [`DataObject::holds`] tells what of it is there. Dropped without [`DataObject::seal`] it stays to be gone on
    /// with. Only one at a time may be open for a key, in all processes of this machine.
    ///
    /// Errors: those of [`create_data`](Self::create_data); `already_exists` also where its writer may be alive, or
    /// what is there cannot be gone on with; `unsupported` where the store cannot tell: then use another key.
    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.create_data(key, bytes)
    }

    /// Opens an object for ranged reads. `not_found` where there is none.
    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>>;
}

/// A shared store is a store.
impl<S: Store + ?Sized> Store for Arc<S> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn abilities(&self) -> Abilities {
        (**self).abilities()
    }

    fn forget_abilities(&self) {
        (**self).forget_abilities();
    }

    fn is_remote(&self) -> bool {
        (**self).is_remote()
    }

    fn sees_all(&self) -> bool {
        (**self).sees_all()
    }

    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        (**self).above()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        (**self).get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        (**self).create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        (**self).put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        (**self).list(prefix, limit)
    }

    fn list_here(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        (**self).list_here(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        (**self).names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        (**self).remove(key)
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        (**self).discard(keys)
    }

    fn unfinished(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        (**self).unfinished(prefix, limit)
    }

    fn forget_unfinished(&self, key: &str) -> Result<u64> {
        (**self).forget_unfinished(key)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        (**self).publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        (**self).create_data(key, bytes)
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        (**self).resume_data(key, bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        (**self).open_data(key)
    }
}
