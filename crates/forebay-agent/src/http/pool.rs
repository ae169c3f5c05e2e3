//! Threads for actions. A promotion copies a step, for hours if it has to, and a pin waits for stores that may hang:
//! whatever many do so, the page, the API and the metrics are answered by threads of their own, and a pause gets
//! through.

use std::sync::Arc;

use forebay_error::{Error, Result};
use tokio::sync::Semaphore;
use tokio::sync::oneshot::{Receiver, channel};

/// What an action waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A copy of a step.
    Copy,
    /// An answer of every tier.
    Stores,
    /// Nothing but this process, and the audit log.
    Nothing,
}

impl Kind {
    /// By the name of an action; what is no action is refused soon.
    pub(super) fn of(action: &str) -> Self {
        match action {
            "promote" => Self::Copy,
            "pin" | "unpin" | "hold" | "release" => Self::Stores,
            _ => Self::Nothing,
        }
    }

    /// How many at a time.
    const fn most(self) -> usize {
        match self {
            Self::Copy => 4,
            Self::Stores | Self::Nothing => 16,
        }
    }
}

/// Places for actions.
pub(super) struct Pool {
    copies: Arc<Semaphore>,
    stores: Arc<Semaphore>,
    nothing: Arc<Semaphore>,
}

impl Default for Pool {
    fn default() -> Self {
        let places = |kind: Kind| Arc::new(Semaphore::new(kind.most()));
        let (copies, stores) = (places(Kind::Copy), places(Kind::Stores));
        Self { copies, stores, nothing: places(Kind::Nothing) }
    }
}

impl Pool {
    /// Runs an action on a thread; its result comes, whether or not somebody waits for it. `None`: as many of the kind
    /// as are allowed are under way. Errors: no thread.
    pub(super) fn run<T: Send + 'static>(
        &self,
        kind: Kind,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<Receiver<T>>> {
        let places = match kind {
            Kind::Copy => &self.copies,
            Kind::Stores => &self.stores,
            Kind::Nothing => &self.nothing,
        };
        let Ok(place) = Arc::clone(places).try_acquire_owned() else { return Ok(None) };
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("forebay-act".to_owned());
        let started = thread.spawn(move || {
            let done = act();
            drop(place);
            // Who asked may be gone.
            let _ = sender.send(done);
        });
        started.map_err(|error| Error::io("cannot start a thread", error))?;
        Ok(Some(receiver))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    #[test]
    fn each_kind_is_bounded_and_waits_for_no_other() {
        let pool = Pool::default();
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let wait = |kind| {
            let gate = Arc::clone(&gate);
            pool.run(kind, move || gate.lock().unwrap().recv()).unwrap()
        };
        let mut under_way = Vec::new();
        for kind in [Kind::Copy, Kind::Stores] {
            under_way.extend((0..kind.most()).map(|_| wait(kind).unwrap()));
            assert!(wait(kind).is_none(), "one more than there are places");
        }
        let pause = pool.run(Kind::of("pause"), || 7).unwrap().unwrap();
        assert_eq!(pause.blocking_recv().unwrap(), 7);
        drop(go);
        for done in under_way {
            let _ = done.blocking_recv().unwrap();
        }
        assert_eq!(pool.run(Kind::Copy, || 8).unwrap().unwrap().blocking_recv().unwrap(), 8);
    }
}
