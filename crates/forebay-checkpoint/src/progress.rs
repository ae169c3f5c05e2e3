//! What long work tells while it goes on: how much there is, how much is done, and whether to go on.

use forebay_error::Result;

/// Somebody who watches. Called from several threads.
pub trait Progress: Sync {
    /// So many bytes there are in all, as far as is known; called before the first [`add`](Self::add), maybe again.
    fn total(&self, bytes: u64);

    /// So many more are done. An error ends the work, and is what it returns.
    fn add(&self, bytes: u64) -> Result<()>;
}

/// Nobody watches.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Progress for Unwatched {
    fn total(&self, _: u64) {}

    fn add(&self, _: u64) -> Result<()> {
        Ok(())
    }
}
