//! Who logged in by a browser. A session is a random text in a cookie that no script and no other site can use
//! (`HttpOnly`, `SameSite=Strict`); the forms of its pages carry a second random text, so that a page elsewhere that
//! makes a browser send a form is refused even by a browser that knows no `SameSite`.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_error::Result;
use subtle::ConstantTimeEq;

use crate::secret::random;

/// Most at a time; the oldest goes.
const SESSIONS_MAX: usize = 64;
/// How long one holds.
const SESSION_TIME: Duration = Duration::from_secs(12 * 3600);
/// Characters of a session's name: enough to tell those of a log apart.
const NAME_CHARS: usize = 8;

struct Session {
    name: String,
    cookie: String,
    form: String,
    may_act: bool,
    until: Instant,
}

/// What a cookie is good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Visitor {
    /// What logs call the session: random, and of no use to anybody.
    pub(crate) name: String,
    /// What forms must carry.
    pub(crate) form: String,
    /// Whether actions are allowed, or just reading.
    pub(crate) may_act: bool,
}

/// All of an agent's.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<VecDeque<Session>>);

impl Sessions {
    /// Makes one; returns what the cookie holds, and what logs call it. Errors: no random bytes.
    pub(crate) fn start(&self, may_act: bool) -> Result<(String, String)> {
        let (cookie, form, mut name) = (random()?, random()?, random()?);
        name.truncate(NAME_CHARS);
        let until = Instant::now() + SESSION_TIME;
        let mut all = self.lock();
        if all.len() >= SESSIONS_MAX {
            all.pop_front();
        }
        let started = (cookie.clone(), name.clone());
        all.push_back(Session { name, cookie, form, may_act, until });
        Ok(started)
    }

    /// Whose cookie it is.
    pub(crate) fn find(&self, cookie: &str) -> Option<Visitor> {
        let now = Instant::now();
        let mut all = self.lock();
        all.retain(|session| session.until > now);
        // All are looked at, so that time says nothing.
        let mut found = None;
        for session in all.iter() {
            if same(&session.cookie, cookie) {
                found = Some(Visitor {
                    name: session.name.clone(),
                    form: session.form.clone(),
                    may_act: session.may_act,
                });
            }
        }
        found
    }

    /// Ends one.
    pub(crate) fn end(&self, cookie: &str) {
        self.lock().retain(|session| !same(&session.cookie, cookie));
    }

    /// Ends all.
    pub(crate) fn end_all(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two texts are the same, in a time that does not depend on where they differ.
pub(crate) fn same(one: &str, two: &str) -> bool {
    bool::from(one.as_bytes().ct_eq(two.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_bounded_and_end() {
        let sessions = Sessions::default();
        let (first, name) = sessions.start(true).unwrap();
        let visitor = sessions.find(&first).unwrap();
        assert!(visitor.may_act);
        assert_eq!(visitor.name, name);
        assert!(!first.contains(&name) && !visitor.form.contains(&name), "a log tells secrets");
        assert_eq!(sessions.find("other"), None);
        assert_eq!(sessions.find(""), None);
        let last = (0..SESSIONS_MAX).map(|_| sessions.start(false).unwrap().0).last().unwrap();
        assert_eq!(sessions.find(&first), None, "the oldest goes");
        assert!(!sessions.find(&last).unwrap().may_act);
        sessions.end(&last);
        assert_eq!(sessions.find(&last), None);
        let (again, _) = sessions.start(true).unwrap();
        sessions.end_all();
        assert_eq!(sessions.find(&again), None);
    }
}
