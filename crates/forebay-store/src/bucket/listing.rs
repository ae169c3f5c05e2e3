//! Listings, and how old things are.
//!
//! A listing is asked for page by page. Each page has its own time and tries, so that a store that does not answer is
//! seen as soon as with any other request, and trouble costs a page and not all before it.
//!
//! Ages are the difference of two times of the server's own clock: `Last-Modified` of the object, and `Date` of the
//! answer that listed it. Both are whole seconds, so ages are right within one. Where answers have no date, a small
//! object is written and looked at: its time is the present.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use futures_util::TryStreamExt;
use object_store::list::PaginatedListOptions;
use object_store::path::Path;
use object_store::{ObjectMeta, PutMode};

use super::client::{Client, PutAsk};
use crate::key::TEMP_PREFIX;
use crate::object::{Age, Listed};

/// Bytes of a mark ([`super::publish`]): what has as many is looked at before it is listed.
const MARK_BYTES: u64 = 33;
/// Marks that are older are left over from who was killed, and are listed.
const MARK_AGE: Duration = Duration::from_secs(3600);

/// Bytes of a page, of which its time follows: Azure's have 5000 objects, about 600 bytes each.
const PAGE_BYTES: u64 = 3_000_000;
/// Pages one after another that may tell nothing.
const IDLE_PAGES_MAX: u32 = 1000;

/// What a listing tells.
#[derive(Default)]
struct Found {
    objects: Vec<ObjectMeta>,
    folders: Vec<Path>,
    /// Seconds since 1970 by the server's clock.
    date: Option<i64>,
}

impl Found {
    fn len(&self) -> usize {
        self.objects.len() + self.folders.len()
    }
}

impl Client {
    /// Objects, with `here` those that are in no folder below.
    pub(super) async fn list_objects(
        &self,
        prefix: &str,
        here: bool,
        limit: usize,
    ) -> Result<Vec<Listed>> {
        let found = self.pages_of(prefix, here, limit).await?;
        let now_ms = match found.date {
            _ if found.objects.is_empty() => 0,
            Some(seconds) => seconds.saturating_mul(1000),
            None => self.now_ms(prefix).await?,
        };
        let mut lines = Vec::with_capacity(found.objects.len());
        for meta in found.objects {
            let Some(key) = self.key(&meta.location).filter(|key| key.starts_with(prefix)) else {
                continue;
            };
            let age = age_of(&meta, now_ms);
            if meta.size != MARK_BYTES || age >= MARK_AGE || !self.is_mark(key).await? {
                lines.push(Listed { key: key.to_owned(), bytes: meta.size, age: Age(age) });
            }
        }
        lines.sort_by(|left, right| left.key.cmp(&right.key));
        Ok(lines)
    }

    pub(super) async fn list_names(
        &self,
        prefix: &str,
        limit: usize,
    ) -> Result<Vec<(String, bool)>> {
        // Marks are not counted: how many names there are is known at the end.
        let most = limit.saturating_mul(2).saturating_add(1000);
        let found = self.pages_of(prefix, true, most).await?;
        let mut names = BTreeMap::new();
        for folder in &found.folders {
            let Some(key) = self.key(folder) else { continue };
            let name = key.trim_end_matches('/').rsplit('/').next().unwrap_or("");
            names.insert(name.to_owned(), true);
        }
        for meta in &found.objects {
            let Some(key) = self.key(&meta.location) else { continue };
            let Some(name) = key.strip_prefix(prefix).filter(|name| !name.contains('/')) else {
                continue;
            };
            if meta.size != MARK_BYTES || !self.is_mark(key).await? {
                names.entry(name.to_owned()).or_insert(false);
            }
        }
        if names.len() > limit {
            return Err(self.too_many(prefix, limit));
        }
        Ok(names.into_iter().collect())
    }

    /// All pages; more than `limit` objects and folders are `unsupported`. With a delimiter what is directly below.
    async fn pages_of(&self, prefix: &str, delimited: bool, limit: usize) -> Result<Found> {
        let path = self.folder(prefix)?;
        let Some(pages) = &self.pages else {
            let found = self.at_once(path, prefix, delimited).await?;
            return if found.len() > limit { Err(self.too_many(prefix, limit)) } else { Ok(found) };
        };
        let below = path.map(|path| format!("{path}/"));
        let ask = self.ask("cannot list objects", prefix, PAGE_BYTES);
        let (mut found, mut token, mut idle) = (Found::default(), None, 0);
        loop {
            let request = || {
                let options = PaginatedListOptions {
                    delimiter: delimited.then_some("/".into()),
                    page_token: token.clone(),
                    ..PaginatedListOptions::default()
                };
                pages.list_paginated(below.as_deref(), options)
            };
            let (page, note) = self.retries.ask(&ask, request).await?;
            let before = found.len();
            found.objects.extend(page.result.objects);
            found.folders.extend(page.result.common_prefixes);
            found.date = note.date.or(found.date);
            if found.len() > limit {
                return Err(self.too_many(prefix, limit));
            }
            idle = if found.len() > before { 0 } else { idle + 1 };
            let Some(next) = page.page_token else { return Ok(found) };
            if idle > IDLE_PAGES_MAX || token.as_ref() == Some(&next) {
                let what = "the store's listing does not come to an end";
                return Err(Error::new(Code::Io, what).at(self.place(prefix)));
            }
            token = Some(next);
        }
    }

    /// The same of a store that is in this process.
    async fn at_once(&self, path: Option<Path>, prefix: &str, delimited: bool) -> Result<Found> {
        let ask = self.ask("cannot list objects", prefix, PAGE_BYTES);
        let request = || async {
            if !delimited {
                let objects = self.objects.list(path.as_ref()).try_collect().await?;
                return Ok(Found { objects, ..Found::default() });
            }
            let listed = self.objects.list_with_delimiter(path.as_ref()).await?;
            let (objects, folders) = (listed.objects, listed.common_prefixes);
            Ok(Found { objects, folders, date: None })
        };
        Ok(self.retries.ask(&ask, request).await?.0)
    }

    fn folder(&self, prefix: &str) -> Result<Option<Path>> {
        match (prefix.strip_suffix('/'), self.prefix.is_empty()) {
            (Some(key), _) => self.path(key).map(Some),
            (None, true) => Ok(None),
            (None, false) => {
                let parsed = Path::parse(&self.prefix);
                let fault = |error: object_store::path::Error| {
                    Error::new(Code::UnsafePath, error.to_string()).at(&self.name)
                };
                parsed.map(Some).map_err(fault)
            }
        }
    }

    /// One that is gone by now is none.
    async fn is_mark(&self, key: &str) -> Result<bool> {
        Ok(self.look(key).await?.is_none_or(|there| there.is_removed()))
    }

    /// The server's time: of an object that was written just now.
    async fn now_ms(&self, prefix: &str) -> Result<i64> {
        let key = format!("{prefix}{TEMP_PREFIX}clock-{}", self.unique());
        let put = PutAsk {
            what: "cannot write an object to learn the store's time",
            mode: PutMode::Overwrite,
            write: "clock",
            until: None,
            tampered: None,
        };
        self.put_small(&key, &Bytes::new(), &put).await?;
        let looked = self.look(&key).await;
        self.delete(std::slice::from_ref(&key)).await?;
        let gone = || Error::new(Code::Io, "an object is gone that was just written");
        looked?.map(|looked| looked.modified_ms).ok_or_else(|| gone().at(self.place(&key)))
    }

    fn too_many(&self, prefix: &str, limit: usize) -> Error {
        Error::new(Code::Unsupported, format!("more than {limit} objects")).at(self.place(prefix))
    }
}

fn age_of(meta: &ObjectMeta, now_ms: i64) -> Duration {
    let age = now_ms.saturating_sub(meta.last_modified.timestamp_millis());
    Duration::from_millis(u64::try_from(age).unwrap_or(0))
}
