//! Who may do what by HTTP.
//!
//! | who | may read | may act |
//! | --- | --- | --- |
//! | nobody in particular, no token for reading configured (loopback only) | yes | no |
//! | `Authorization: Bearer` with the token for reading | yes | no |
//! | `Authorization: Bearer` with the token for actions | yes | yes |
//! | `Authorization: Bearer` with the token of agents | what is copied between them, and nothing else | |
//! | the cookie of a session | yes | by forms of the page, with TLS, if the session began with the token for actions |
//!
//! A browser sends the cookies of a host to every port of it, so without TLS the server that another user of the
//! machine has started on a port of its own could take one: what may be done with it is to read, whatever the token
//! was.
//!
//! A browser sends cookies by itself, so they count for the page and its forms alone, never for the API's actions. A
//! site whose name is made to lead to this machine (DNS rebinding) could read what needs no token, so without one the
//! `Host` header must name loopback.

use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, COOKIE, HOST};

use crate::secret::Secret;
use crate::session::{Sessions, Visitor};

/// What is configured.
pub(super) struct Access {
    tokens: RwLock<Tokens>,
    is_tls: bool,
}

#[derive(Clone)]
struct Tokens {
    read: Option<Secret>,
    act: Option<Secret>,
    peer: Option<Secret>,
}

/// What a request may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rights {
    pub(super) read: bool,
    /// By the API.
    pub(super) act: bool,
    /// Who logged in.
    pub(super) visitor: Option<Visitor>,
    /// Whether a token was given that is none.
    pub(super) wrong: bool,
}

impl Access {
    pub(super) fn new(read: Option<Secret>, act: Option<Secret>, is_tls: bool) -> Self {
        Self { tokens: RwLock::new(Tokens { read, act, peer: None }), is_tls }
    }

    /// Another token of agents, from now on.
    pub(super) fn set_peer(&self, peer: Option<Secret>) {
        self.tokens.write().unwrap_or_else(PoisonError::into_inner).peer = peer;
    }

    /// Whether a request is another agent's. No other token makes it one, and this one opens nothing else.
    pub(super) fn is_peer(&self, head: &HeaderMap) -> bool {
        let peer = self.tokens().peer;
        peer.is_some_and(|peer| bearer(head).is_some_and(|guess| peer.is(guess)))
    }

    /// Other tokens, from now on; whether they are others.
    pub(super) fn renew(&self, read: Option<Secret>, act: Option<Secret>) -> bool {
        let mut tokens = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
        let same = |one: &Option<Secret>, two: &Option<Secret>| match (one, two) {
            (Some(one), Some(two)) => one.same(two),
            (None, None) => true,
            _ => false,
        };
        let is_new = !same(&tokens.read, &read) || !same(&tokens.act, &act);
        (tokens.read, tokens.act) = (read, act);
        is_new
    }

    fn tokens(&self) -> Tokens {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the head of a request allows.
    pub(super) fn rights(&self, head: &HeaderMap, sessions: &Sessions) -> Rights {
        let mut rights = Rights::default();
        if let Some(guess) = bearer(head) {
            match self.token(guess) {
                Some(may_act) => (rights.read, rights.act) = (true, may_act),
                None => rights.wrong = true,
            }
            return rights;
        }
        rights.visitor = self.cookie(head).and_then(|cookie| sessions.find(cookie));
        let open = self.is_open() && names_loopback(head);
        rights.read = open || rights.visitor.is_some();
        rights
    }

    /// Whether a text is a token, and whether it is the one for actions.
    pub(super) fn token(&self, guess: &[u8]) -> Option<bool> {
        let is = |secret: &Option<Secret>| secret.as_ref().is_some_and(|secret| secret.is(guess));
        let tokens = self.tokens();
        // Both are compared, so that time does not tell them apart.
        match (is(&tokens.act), is(&tokens.read)) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    /// What a session that begins with this text may: nothing where it is no token, else whether to act.
    pub(super) fn login(&self, guess: &[u8]) -> Option<bool> {
        self.token(guess).map(|may_act| may_act && self.is_tls)
    }

    /// Whether logging in gives a visitor more.
    pub(super) fn may_login(&self, visitor: Option<&Visitor>) -> bool {
        match visitor {
            None => !self.is_open() || (self.allows_actions() && self.is_tls),
            Some(_) => false,
        }
    }

    /// Whether anybody who reaches it may read.
    pub(super) fn is_open(&self) -> bool {
        self.tokens().read.is_none()
    }

    /// Whether it is reached by TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Whether there is a token for actions.
    pub(super) fn allows_actions(&self) -> bool {
        self.tokens().act.is_some()
    }

    /// What the session's cookie holds.
    pub(super) fn cookie<'h>(&self, head: &'h HeaderMap) -> Option<&'h str> {
        let cookies = head.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
        let mut pairs = cookies.flat_map(|line| line.split(';'));
        pairs.find_map(|pair| {
            let (name, value) = pair.trim().split_once('=')?;
            (name == self.cookie_name()).then_some(value)
        })
    }

    /// The header that sets it, or with nothing removes it.
    pub(super) fn set_cookie(&self, value: &str) -> String {
        let secure = if self.is_tls { "; Secure" } else { "" };
        let age = if value.is_empty() { "; Max-Age=0" } else { "" };
        let name = self.cookie_name();
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}")
    }

    /// With TLS browsers make sure that no other host of the domain sets it.
    fn cookie_name(&self) -> &'static str {
        if self.is_tls { "__Host-forebay" } else { "forebay" }
    }
}

fn bearer(head: &HeaderMap) -> Option<&[u8]> {
    let value = head.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

fn names_loopback(head: &HeaderMap) -> bool {
    let mut hosts = head.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    fn head(lines: &[(hyper::header::HeaderName, &str)]) -> HeaderMap {
        let mut head = HeaderMap::new();
        for (name, value) in lines {
            head.append(name.clone(), HeaderValue::from_str(value).unwrap());
        }
        head
    }

    #[test]
    fn without_a_token_only_loopback_names_are_answered() {
        let (access, sessions) = (Access::new(None, None, false), Sessions::default());
        let may = |host| access.rights(&head(&[(HOST, host)]), &sessions).read;
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:9", "127.9.9.9", "[::1]:80", "[::1]"] {
            assert!(may(host), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", ""] {
            assert!(!may(host), "{host}");
        }
        assert!(!access.rights(&head(&[]), &sessions).read);
        let two = head(&[(HOST, "localhost"), (HOST, "evil.example")]);
        assert!(!access.rights(&two, &sessions).read);
    }

    #[test]
    fn a_cookie_reads_and_never_acts_by_the_api() {
        let (access, sessions) = (Access::new(None, None, true), Sessions::default());
        let (cookie, _) = sessions.start(true).unwrap();
        let sent = format!("a=b; __Host-forebay={cookie}; forebay=x");
        let rights = access.rights(&head(&[(COOKIE, &sent)]), &sessions);
        assert!(rights.read && !rights.act && rights.visitor.unwrap().may_act);
        let plain = format!("forebay={cookie}");
        assert_eq!(access.rights(&head(&[(COOKIE, &plain)]), &sessions), Rights::default());
        assert!(access.set_cookie("x").contains("; HttpOnly; SameSite=Strict; Secure"));
    }

    #[test]
    fn without_tls_nobody_logs_in_to_act() {
        let secret = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            Some(Secret::read(file.path(), "the token").unwrap())
        };
        let (read, act) = (b"0123456789abcdef-read", b"0123456789abcdef-act");
        for is_tls in [false, true] {
            let access = Access::new(
                secret("0123456789abcdef-read"),
                secret("0123456789abcdef-act"),
                is_tls,
            );
            assert_eq!(access.login(read), Some(false));
            assert_eq!(access.login(act), Some(is_tls));
            assert_eq!(access.login(b"0123456789abcdef-other"), None);
            assert_eq!(access.token(act), Some(true), "the API takes it as a header");
            let only_acts = Access::new(None, secret("0123456789abcdef-act"), is_tls);
            assert_eq!(only_acts.may_login(None), is_tls, "there is nothing to gain");
        }
    }
}
