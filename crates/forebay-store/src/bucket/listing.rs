//! Listings, and how old things are.
//!
//! Ages are the difference of two times of the server's own clock: `Last-Modified` of the object, and `Date` of the
//! answer that listed it. Both are whole seconds, so ages are right within one. Where answers have no date, a small
//! object is written and looked at: its time is the present.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use futures_util::TryStreamExt;
use object_store::{ObjectMeta, PutMode};

use super::client::{Client, PutAsk};
use crate::key::TEMP_PREFIX;
use crate::object::{Age, Listed};

/// Bytes of a mark ([`super::publish`]): what has as many is looked at before it is listed.
const MARK_BYTES: u64 = 33;
/// Marks that are older are left over from who was killed, and are listed.
const MARK_AGE: Duration = Duration::from_secs(3600);

impl Client {
    pub(super) async fn list_objects(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        let path = self.folder(prefix)?;
        let request = || async {
            // One more than may be there tells whether there are.
            let mut found = Vec::new();
            let mut listed = self.objects.list(path.as_ref());
            while let Some(meta) = listed.try_next().await? {
                found.push(meta);
                if found.len() > limit {
                    break;
                }
            }
            Ok(found)
        };
        let ask = self.ask("cannot list objects", prefix, limit as u64 * 500);
        let (found, note) = self.retries.ask(&ask, request).await?;
        if found.len() > limit {
            return Err(self.too_many(prefix, limit));
        }
        let now_ms = match note.date {
            _ if found.is_empty() => 0,
            Some(seconds) => seconds.saturating_mul(1000),
            None => self.now_ms(prefix).await?,
        };
        let mut lines = Vec::with_capacity(found.len());
        for meta in found {
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
        let path = self.folder(prefix)?;
        let request = || self.objects.list_with_delimiter(path.as_ref());
        let ask = self.ask("cannot list objects", prefix, limit as u64 * 500);
        let (found, _) = self.retries.ask(&ask, request).await?;
        let mut names = BTreeMap::new();
        for folder in &found.common_prefixes {
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

    fn folder(&self, prefix: &str) -> Result<Option<object_store::path::Path>> {
        match (prefix.strip_suffix('/'), self.prefix.is_empty()) {
            (Some(key), _) => self.path(key).map(Some),
            (None, true) => Ok(None),
            (None, false) => {
                let parsed = object_store::path::Path::parse(&self.prefix);
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
