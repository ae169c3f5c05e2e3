//! Trying again: the one place where requests are repeated.
//!
//! A request has so many tries and so much time ([`StoreSettings`]), with a wait of random length that doubles in
//! between, or what `Retry-After` asks for. All requests of a store share a budget, so that a store in trouble is not
//! buried under retries: one costs [`COST`] tokens, a success gives one back. The layers below never try by themselves,
//! so that it is known here whether an earlier try may have been carried out (`unsure`): whoever then finds a
//! precondition failed must look whether it was its own doing. One that was refused for its credentials is repeated
//! once, if others are to be had ([`renewal`](super::renewal)).

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_error::{Code, Error};
use tokio::time::Instant;

use super::failure::{Failed, Kind, error_of, is_of_credentials, is_refusal, kind_of};
use super::gate::Gate;
use super::place::Provider;
use super::renewal::Renewal;
use super::settings::StoreSettings;
use super::wire::{self, Note};

/// Tokens that a retry costs.
const COST: u32 = 5;
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is asked, and within which limits.
pub(super) struct Ask<'a> {
    /// For errors: `cannot put`, say.
    pub(super) what: &'a str,
    /// For errors: the object.
    pub(super) place: String,
    /// How many bytes move; the time for a try depends on it.
    pub(super) bytes: u64,
    /// Told of trouble, if the request went through it.
    pub(super) gate: Option<&'a Gate>,
    /// No try lasts longer than this.
    pub(super) until: Option<Instant>,
}

/// A try that failed.
struct Tried {
    kind: Kind,
    error: Error,
    note: Note,
    /// The credentials were not taken.
    refused: bool,
}

/// See the module.
pub(super) struct Retries {
    settings: StoreSettings,
    provider: Option<Provider>,
    renewal: Renewal,
    tokens: Mutex<u32>,
    random: RandomState,
}

impl Retries {
    pub(super) fn new(
        settings: &StoreSettings,
        provider: Option<Provider>,
        renewal: Renewal,
    ) -> Self {
        let tokens = Mutex::new(settings.retry_budget);
        Self { settings: settings.clone(), provider, renewal, tokens, random: RandomState::new() }
    }

    /// Whether credentials were refused, and cannot be read anew.
    pub(super) fn is_refused(&self) -> bool {
        self.renewal.is_refused()
    }

    /// Asks until there is an answer, or no hope.
    pub(super) async fn ask<T, F>(
        &self,
        ask: &Ask<'_>,
        request: impl FnMut() -> F,
    ) -> Result<(T, Note), Failed>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.ask_as(ask, true, request).await
    }

    /// The same for what who may write need not be let do: that a permission is lacking for it is no reason to doubt
    /// the credentials.
    pub(super) async fn ask_beside<T, F>(
        &self,
        ask: &Ask<'_>,
        request: impl FnMut() -> F,
    ) -> Result<(T, Note), Failed>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.ask_as(ask, false, request).await
    }

    async fn ask_as<T, F>(
        &self,
        ask: &Ask<'_>,
        is_needed: bool,
        mut request: impl FnMut() -> F,
    ) -> Result<(T, Note), Failed>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let start = Instant::now();
        let end = start + self.settings.retry_time.max(self.settings.timeout(ask.bytes));
        let end = ask.until.map_or(end, |until| until.min(end));
        let (mut tries, mut unsure, mut renewed) = (0, false, false);
        loop {
            tries += 1;
            let until = end.min(Instant::now() + self.settings.timeout(ask.bytes));
            let sent = std::time::Instant::now();
            let failed = match self.once(ask, until, request()).await {
                Ok(done) => return Ok(done),
                Err(failed) => failed,
            };
            let Tried { kind, mut error, note, refused } = failed;
            let refused = refused && (is_needed || is_of_credentials(&error));
            if refused && self.renewal.refused(sent) && !std::mem::replace(&mut renewed, true) {
                continue;
            }
            let status = note.status;
            let Kind::Transient { slow } = kind else {
                error = with_tries(error, tries);
                return Err(Failed { kind, unsure, status, error });
            };
            unsure = true;
            if let Some(gate) = ask.gate.filter(|_| slow) {
                gate.slow_down();
            }
            let pause = note.retry_after.unwrap_or_else(|| self.pause(tries));
            let late = Instant::now() + pause >= end;
            if tries > self.settings.retries || late || !self.spend() {
                let error = with_tries(error, tries);
                return Err(Failed { kind, unsure, status, error });
            }
            tracing::debug!(what = ask.what, place = ask.place, tries, "trying again");
            tokio::time::sleep(pause).await;
        }
    }

    async fn once<T>(
        &self,
        ask: &Ask<'_>,
        until: Instant,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<(T, Note), Tried> {
        let (answer, note) = wire::note(tokio::time::timeout_at(until, request)).await;
        match answer {
            Ok(Ok(value)) => {
                self.earn();
                Ok((value, note))
            }
            Ok(Err(raw)) => {
                let error = error_of(ask.what, &raw, &note, 1).at(&ask.place);
                let (kind, refused) =
                    (kind_of(&raw, &note, self.provider), is_refusal(&raw, &note));
                Err(Tried { kind, error, note, refused })
            }
            Err(_) => {
                let what = format!("{}: no answer in time", ask.what);
                let error = Error::new(Code::Timeout, what).at(&ask.place);
                let (kind, note) = (Kind::Transient { slow: true }, Note::default());
                Err(Tried { kind, error, note, refused: false })
            }
        }
    }

    /// Waits as before another try.
    pub(super) async fn rest(&self, tries: u32) {
        tokio::time::sleep(self.pause(tries)).await;
    }

    /// Full jitter: any time up to a bound that doubles.
    fn pause(&self, tries: u32) -> Duration {
        let bound = PAUSE_FIRST.saturating_mul(1 << tries.min(10)).min(PAUSE_MAX);
        let random = self.random.hash_one((tries, Instant::now()));
        bound.mul_f64((random >> 11) as f64 / (1_u64 << 53) as f64)
    }

    fn spend(&self) -> bool {
        let mut tokens = self.tokens();
        match tokens.checked_sub(COST) {
            Some(left) => {
                *tokens = left;
                true
            }
            None => false,
        }
    }

    fn earn(&self) {
        let mut tokens = self.tokens();
        *tokens = tokens.saturating_add(1).min(self.settings.retry_budget);
    }

    fn tokens(&self) -> MutexGuard<'_, u32> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn with_tries(error: Error, tries: u32) -> Error {
    if tries < 2 { error } else { error.within(format!("{tries} tries")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::runtime;

    fn asked(settings: &StoreSettings, outcomes: u32) -> (Result<(), Failed>, u32) {
        let retries = Retries::new(settings, None, Renewal::new());
        let ask =
            Ask { what: "cannot get", place: "x".to_owned(), bytes: 0, gate: None, until: None };
        let mut asked = 0;
        let result = runtime::wait(&runtime::handle().unwrap(), async {
            let request = || {
                asked += 1;
                let fails = asked <= outcomes;
                async move {
                    match fails {
                        true => std::future::pending().await,
                        false => Ok(()),
                    }
                }
            };
            retries.ask(&ask, request).await.map(drop)
        });
        (result, asked)
    }

    fn quick() -> StoreSettings {
        let request_timeout = Duration::from_millis(5);
        StoreSettings { request_timeout, retries: 3, ..StoreSettings::default() }
    }

    #[test]
    fn trouble_that_passes_is_not_told() {
        let (result, asked) = asked(&quick(), 2);
        assert!(result.is_ok());
        assert_eq!(asked, 3);
    }

    #[test]
    fn tries_time_and_budget_end() {
        let (result, tries) = asked(&quick(), 99);
        let failed = result.unwrap_err();
        assert_eq!((failed.error.code(), failed.unsure, tries), (Code::Timeout, true, 4));
        let poor = StoreSettings { retry_budget: COST, ..quick() };
        assert_eq!(asked(&poor, 99).1, 2);
        let hasty = StoreSettings { retry_time: Duration::ZERO, ..quick() };
        assert_eq!(asked(&hasty, 99).1, 1);
    }
}
