//! What stores speak of.

use std::time::Duration;

use forebay_engine::RangeSink;
use forebay_error::Result;

/// A state of an object: two are equal only if the object was not written in between. An entity tag in a bucket, inode,
/// size, mtime and a checksum in a directory. Where a bucket's entity tag is a hash of the bytes, an object that was
/// replaced by the same bytes counts as not written. Opaque to callers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub Vec<u8>);

/// How old an object is by the store's own clock: never the difference of two machines' clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Age(pub Duration);

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The object's key, relative to the store.
    pub key: String,
    /// Its bytes.
    pub bytes: u64,
    /// Its age, as of the listing.
    pub age: Age,
}

/// What must be at the destination for a publication to happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Nothing.
    Absent,
    /// The object in this state.
    Version(Version),
}

/// How a publication ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The destination is now what was staged, durably.
    Done {
        /// False where the store cannot promise that the change survives a loss of power (say, it refuses to fsync a
        /// directory).
        durable: bool,
    },
    /// Somebody else's object is there, or the expected one is not there any more. Nothing was changed.
    Lost,
    /// What was to be published is gone: the attempt was given up for dead and collected.
    Withdrawn,
}

/// What a store was found to honour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Create-if-absent is atomic.
    pub create_if_absent: bool,
    /// Replace-if-unchanged is atomic, or as good as: see the store.
    pub replace_if_version: bool,
    /// What was published survives a loss of power.
    pub durable_publish: bool,
    /// Room can be set aside before it is written to.
    pub reserves_space: bool,
    /// Bytes that do not match the checksum sent with them are refused. A folder is sent none.
    pub rejects_bad_checksums: bool,
    /// It gives back the checksum of what it took, which is compared.
    pub returns_checksums: bool,
    /// Longest time between a publication's reading what is staged and its being visible or given up. Zero where a
    /// publication fails once what is staged is gone. Who removes what is staged, so that it be never published, looks
    /// at the destination again after that time.
    pub publish_time: Duration,
}

/// An object that is written in ranges. Dropped without [`seal`](Self::seal) it may stay, whole or torn, under its key,
/// which must be unique to the attempt.
pub trait DataObject: Send + Sync {
    /// Where its bytes go. Ranges may be written from many threads at once, in any order, but may not overlap.
    fn sink(&self) -> &dyn RangeSink;

    /// Whether the range has these very bytes from a writer before: then they need not be written, and may not be. It
    /// is found out by what the store has, not by what anybody remembers: by reading it, or by the store's checksum of
    /// it. False where that cannot be told, and for ranges that were written through this object.
    ///
    /// Errors: I/O.
    fn holds(&self, _bytes: &[u8], _offset: u64) -> Result<bool> {
        Ok(false)
    }

    /// Makes every byte that was written durable, with its name. Called once, after the last write. A failure is
    /// final: it is never tried again on the same object, since the system may have dropped the bytes.
    fn seal(&self) -> Result<()>;
}
