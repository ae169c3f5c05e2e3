//! Credentials that a store refuses: when to ask for others.
//!
//! Those that say when they expire are asked for anew in time. Others, such as keys in a file that somebody replaces,
//! are found to be old by a refusal alone (401, 403, `ExpiredToken`). A refusal may as well mean a permission that is
//! lacking, so they are not asked for more often than every [`REST`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Credentials that are younger are not doubted.
const REST: Duration = Duration::from_secs(10);

/// What a store and whatever gives its credentials tell each other. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Renewal(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// When the credentials were read that are in use.
    since: Instant,
    /// They are to be read anew before the next request.
    wanted: bool,
    /// Somebody reads them anew when that is wanted.
    heard: bool,
    /// They were refused.
    refused: bool,
}

impl Renewal {
    /// For credentials that are read now.
    pub(super) fn new() -> Self {
        let state = State { since: Instant::now(), wanted: false, heard: false, refused: false };
        Self(Arc::new(Mutex::new(state)))
    }

    /// A request that was sent at that time was refused: whether other credentials are there, or to be had.
    pub(super) fn refused(&self, sent: Instant) -> bool {
        let mut state = self.state();
        if state.since > sent {
            return true;
        }
        if state.since.elapsed() < REST {
            return false;
        }
        state.refused = true;
        state.wanted = state.heard;
        state.heard
    }

    /// Whether there was a refusal, and nobody who reads credentials anew.
    pub(super) fn is_refused(&self) -> bool {
        let state = self.state();
        state.refused && !state.heard
    }

    /// Who asks will read them anew where it is wanted.
    #[cfg_attr(not(feature = "aws-profiles"), expect(dead_code, reason = "nobody reads files"))]
    pub(super) fn listen(&self) {
        self.state().heard = true;
    }

    /// Whether they are to be read anew. Says that they are from now on.
    #[cfg_attr(not(feature = "aws-profiles"), expect(dead_code, reason = "nobody reads files"))]
    pub(super) fn is_wanted(&self) -> bool {
        let mut state = self.state();
        if state.wanted {
            (state.wanted, state.since) = (false, Instant::now());
            return true;
        }
        false
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn aged(self) -> Self {
        let past = Instant::now().checked_sub(REST * 2).unwrap();
        self.state().since = past;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_renews_what_is_old_once() {
        let young = Renewal::new();
        young.listen();
        let sent = Instant::now();
        assert!(!young.refused(sent) && !young.is_wanted());
        let old = young.aged();
        assert!(old.refused(sent) && old.is_wanted() && !old.is_wanted());
        assert!(old.refused(sent), "sent before that");
        assert!(!old.refused(Instant::now()), "a permission is lacking");
        assert!(!old.is_refused());
    }

    #[test]
    fn a_store_that_cannot_renew_is_refused() {
        let renewal = Renewal::new().aged();
        assert!(!renewal.is_refused() && !renewal.refused(Instant::now()));
        assert!(renewal.is_refused() && !renewal.is_wanted());
    }
}
