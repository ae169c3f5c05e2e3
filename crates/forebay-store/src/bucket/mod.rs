//! A store in a bucket: S3 and compatible, GCS, Azure.
//!
//! | call | how it is one step, and durable |
//! | --- | --- |
//! | `create` | PUT with `If-None-Match: *` (a generation of 0 on GCS) |
//! | `put` | PUT |
//! | `publish` | the staged object is read and PUT conditionally, then removed: see [`publish`] |
//! | `remove`, `discard` | DELETE, of a thousand at once where the store can |
//! | `create_data` | multipart upload, complete with `seal`: see [`upload`] |
//! | `resume_data` | the same upload, part by part, on S3: see [`resume`] |
//! | `unfinished` | the list of multipart uploads, on S3: see [`unfinished`] |
//! | `open_data` | ranged GETs of one version: see [`download`] |
//! | ages | `Date` of the answer less `Last-Modified`: see [`listing`] |
//!
//! A version is the entity tag and, in versioned buckets, the version's id. On most stores the tag follows from the
//! bytes: an object that was replaced and put back counts as unchanged there.
//!
//! What the store honours is found out before the first change that needs it ([`probe`]). Trouble passes through
//! one place ([`retry`]), requests in flight are regulated ([`gate`]), slow reads are asked for twice ([`hedge`]),
//! connections leave this machine as they are told to ([`dial`]), and no error, log or `Debug` holds a secret
//! ([`failure`]).

mod client;
mod dial;
mod download;
mod failure;
mod gate;
mod hedge;
mod listing;
mod open;
mod place;
mod probe;
mod profile;
mod publish;
mod ranges;
mod renewal;
mod resume;
mod retry;
mod room;
mod runtime;
mod settings;
mod unfinished;
mod upload;
mod wire;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use object_store::PutMode;

pub use settings::StoreSettings;

use crate::key::{check_key, check_prefix};
use crate::object::{Abilities, DataObject, Expect, Listed, Published, Version};
use crate::posix::PosixStore;
use crate::shared::shared_store;
use crate::store::Store;
use client::{Client, PutAsk};
pub(crate) use place::Place;
pub use place::split_url;

/// Opens a store: a path or `file:` URL, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, or
/// `memory:NAME/PREFIX`, which lives as long as this process (without a name it is new and empty); `node:` and `near:`
/// are [`SplitStore`](crate::SplitStore)s. Nothing is sent yet.
///
/// Errors: `usage` for other URLs and settings that do not fit; `not_found` for a folder that is not there.
pub fn open_store(url: &str, settings: &StoreSettings) -> Result<Arc<dyn Store>> {
    Ok(match Place::parse(url)? {
        Place::Folder(folder) => Arc::new(PosixStore::open(Path::new(&folder))?),
        Place::Split { whole, folder, near } => {
            Arc::new(crate::split::open(&whole, &folder, near, settings)?)
        }
        _ => Arc::new(ObjectStore::open(url, settings)?),
    })
}

/// Uploads of one key, and of those that start like it, that are looked through.
const UNFINISHED_MAX: usize = 100_000;

/// See the module.
pub struct ObjectStore {
    client: Arc<Client>,
    abilities: Mutex<Option<Abilities>>,
}

/// What a store has done so far, for reports and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Requests that may be in flight now: to upload, to download.
    pub limits: (usize, usize),
    /// Reads that were asked for a second time.
    pub hedged: u64,
    /// Most bytes that parts of uploads took at once.
    pub upload_bytes_peak: u64,
}

impl ObjectStore {
    /// Opens a bucket, or `memory:`. Nothing is sent yet.
    ///
    /// Errors: `usage` for other URLs and settings that do not fit.
    pub fn open(url: &str, settings: &StoreSettings) -> Result<Self> {
        let client = match Place::parse(url)? {
            Place::Bucket { provider, bucket, prefix } => {
                open::bucket(provider, &bucket, &prefix, settings)?
            }
            Place::Memory { name, prefix } => open::memory(&name, &prefix, settings)?,
            Place::Folder(_) | Place::Split { .. } => {
                return Err(Error::new(Code::Usage, "a folder is no bucket").at(url));
            }
        };
        Ok(Self { client: Arc::new(client), abilities: Mutex::default() })
    }

    /// What it has done so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            limits: (self.client.uploads.limit(), self.client.downloads.limit()),
            hedged: self.client.pace.asked_again(),
            upload_bytes_peak: self.client.room.most(),
        }
    }

    /// Probes the store, unless that was done. Errors are of the store: then it is tried again at the next call.
    pub fn probe(&self) -> Result<Abilities> {
        let mut abilities = self.abilities.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = *abilities {
            return Ok(known);
        }
        let found = self.run(self.client.probe())?;
        *abilities = Some(found);
        Ok(found)
    }

    /// Whether its credentials were refused after they had been good enough for a while: it had better be opened anew.
    pub(crate) fn is_refused(&self) -> bool {
        self.client.retries.is_refused()
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        runtime::wait(&self.client.handle, future)
    }

    fn start_upload(&self, key: &str, upload: upload::Upload) -> Result<Box<dyn DataObject>> {
        if self.run(self.client.look(key))?.is_some_and(|there| !there.is_removed()) {
            let what = "the key is taken";
            return Err(Error::new(Code::AlreadyExists, what).at(self.client.place(key)));
        }
        Ok(Box::new(upload))
    }

    /// Fails where the store is known not to do what a call rests on.
    fn check_ability(&self, has: impl Fn(&Abilities) -> bool, lacks: &str) -> Result<()> {
        if has(&self.probe()?) {
            return Ok(());
        }
        let what = format!("the store does not {lacks}, or not when several do it at once");
        let error = Error::new(Code::Unsupported, what).at(&self.client.name);
        Err(error.hint("checkpoints need a store that honours If-None-Match and If-Match on PUT"))
    }
}

impl std::fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ObjectStore").field(&self.client.name).finish()
    }
}

const CREATES: &str = "create an object only where there is none";
const REPLACES: &str = "replace an object only where it is unchanged";

impl Store for ObjectStore {
    fn name(&self) -> String {
        self.client.name.clone()
    }

    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        let Some(name) = self.client.prefix.rsplit('/').next().filter(|name| !name.is_empty())
        else {
            return Ok(None);
        };
        let url = self.client.name.strip_suffix(name);
        // Memory without a name is no place that could be opened again.
        let url = url.filter(|url| !url.starts_with("memory:/"));
        let Some(url) = url.map(|url| url.trim_end_matches('/')) else { return Ok(None) };
        Ok(Some((shared_store(url, &self.client.settings)?, name.to_owned())))
    }

    /// Where the store could not be asked, nothing is held against it: the call that needs an ability asks again, and
    /// fails with the reason.
    fn abilities(&self) -> Abilities {
        self.probe().unwrap_or_else(|error| {
            tracing::warn!(%error, "what the store honours is not known");
            Abilities {
                create_if_absent: true,
                replace_if_version: true,
                durable_publish: false,
                reserves_space: false,
                rejects_bad_checksums: false,
                returns_checksums: false,
                publish_time: publish::PUBLISH_TIME,
            }
        })
    }

    fn forget_abilities(&self) {
        *self.abilities.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        check_key(key)?;
        let found = self.run(self.client.fetch(key, max_bytes))?;
        Ok(found.map(|(bytes, looked)| (Vec::from(bytes), looked.version)))
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        check_key(key)?;
        self.check_ability(|can| can.create_if_absent, CREATES)?;
        self.run(self.client.create_small(key, &Bytes::copy_from_slice(bytes)))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        check_key(key)?;
        let put = PutAsk {
            what: "cannot put an object",
            mode: PutMode::Overwrite,
            write: &self.client.unique(),
            until: None,
            tampered: None,
        };
        self.run(self.client.put_small(key, &Bytes::copy_from_slice(bytes), &put))?;
        Ok(())
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        check_prefix(prefix)?;
        self.run(self.client.list_objects(prefix, false, limit))
    }

    fn list_here(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        check_prefix(prefix)?;
        self.run(self.client.list_objects(prefix, true, limit))
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        check_prefix(prefix)?;
        self.run(self.client.list_names(prefix, limit))
    }

    fn remove(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        self.run(async {
            let there = self.client.look(key).await?;
            if there.is_none() {
                return Ok(false);
            }
            self.client.delete(&[key.to_owned()]).await?;
            Ok(there.is_some_and(|there| !there.is_removed()))
        })
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        keys.iter().try_for_each(|key| check_key(key))?;
        self.run(self.client.delete(keys))
    }

    fn unfinished(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        check_prefix(prefix)?;
        let found = self.run(self.client.unfinished(prefix, limit))?;
        Ok(found.into_iter().map(Listed::from).collect())
    }

    fn forget_unfinished(&self, key: &str) -> Result<u64> {
        check_key(key)?;
        let found = self.run(self.client.unfinished(key, UNFINISHED_MAX))?;
        let own = found.into_iter().filter(|upload| upload.key == key);
        own.map(|upload| self.run(self.client.forget(&upload)).map(|()| 1)).sum()
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        check_key(staged)?;
        check_key(to)?;
        if staged == to {
            return Err(Error::new(Code::Usage, "published onto itself").at(self.client.place(to)));
        }
        match expect {
            Expect::Absent => self.check_ability(|can| can.create_if_absent, CREATES)?,
            Expect::Version(_) => self.check_ability(|can| can.replace_if_version, REPLACES)?,
        }
        self.run(self.client.publish_small(staged, to, expect))
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        self.start_upload(key, upload::Upload::new(&self.client, key, bytes)?)
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        self.start_upload(key, upload::Upload::resumed(&self.client, key, bytes)?)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        check_key(key)?;
        let source = self.run(download::Source::open(&self.client, key))?;
        Ok(Arc::new(source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_once_is_found_out_again_when_it_is_forgotten() {
        let store = ObjectStore::open("memory:", &StoreSettings::default()).unwrap();
        let found = store.probe().unwrap();
        assert!(found.create_if_absent);
        let wrong = Abilities { create_if_absent: false, ..found };
        *store.abilities.lock().unwrap() = Some(wrong);
        assert_eq!(store.create("a", b"1").unwrap_err().code(), Code::Unsupported);
        // Of whoever else has it open, too.
        let shared: Arc<dyn Store> = Arc::new(store);
        Arc::clone(&shared).forget_abilities();
        assert!(shared.create("a", b"1").unwrap() && shared.abilities().create_if_absent);
    }
}
