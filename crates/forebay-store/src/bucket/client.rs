//! The requests that everything else here is made of, each with its retries, and each in one step.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use futures_util::StreamExt;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as Raw, GetOptions, GetResult, ObjectMeta, ObjectStore, PutMode,
    PutOptions, PutPayload, UpdateVersion,
};
use tokio::runtime::Handle;
use tokio::time::Instant as Deadline;

use super::failure::{Failed, Kind};
use super::gate::Gate;
use super::hedge::Pace;
use super::open::Stores;
use super::place::Provider;
use super::retry::{Ask, Retries};
use super::room::Room;
use super::settings::StoreSettings;
use super::unfinished::Uploads;
use super::wire::{Note, Tampered};
use crate::key::KEY_BYTES_MAX;
use crate::object::Version;

/// User metadata: which call wrote an object. No hyphen: Azure takes none.
const WRITE: &str = "forebaywrite";
/// Value of it on an object that is being removed: see [`super::publish`].
const REMOVED: &str = "removed";
/// Objects that are deleted one by one; a request for many costs as much as a few of these.
const FEW: usize = 3;
/// Objects that one request deletes at most: S3's limit.
const MANY: usize = 1000;
/// Most bytes of a small object that is read whole before it is published: what one PUT of S3 takes.
pub(super) const PUT_BYTES_MAX: u64 = 5 << 30;

/// A store's connection, and what all its objects share.
pub(super) struct Client {
    /// The URL.
    pub(super) name: String,
    pub(super) prefix: String,
    pub(super) provider: Option<Provider>,
    pub(super) objects: Arc<dyn ObjectStore>,
    singly: Arc<dyn ObjectStore>,
    pub(super) multipart: Arc<dyn MultipartStore>,
    pub(super) pages: Option<Arc<dyn PaginatedListStore>>,
    /// Where the store can list uploads that never ended.
    pub(super) uploads_by_hand: Option<Uploads>,
    pub(super) settings: StoreSettings,
    pub(super) handle: Handle,
    pub(super) retries: Retries,
    pub(super) uploads: Gate,
    pub(super) downloads: Gate,
    pub(super) room: Arc<Room>,
    pub(super) pace: Pace,
    /// Keys of data objects that this process is writing.
    pub(super) writing: Mutex<HashSet<String>>,
    random: RandomState,
    writes: AtomicU64,
}

/// What a look at an object tells.
#[derive(Clone, Debug)]
pub(super) struct Looked {
    pub(super) bytes: u64,
    pub(super) version: Version,
    pub(super) e_tag: Option<String>,
    pub(super) version_id: Option<String>,
    /// Milliseconds since 1970 by the server's clock.
    pub(super) modified_ms: i64,
    write: Option<String>,
}

impl Looked {
    fn of(meta: &ObjectMeta, attributes: &Attributes) -> Self {
        let write = attributes.get(&Attribute::Metadata(WRITE.into()));
        Self {
            bytes: meta.size,
            version: version_of(meta.e_tag.as_deref(), meta.version.as_deref()),
            e_tag: meta.e_tag.clone(),
            version_id: meta.version.clone(),
            modified_ms: meta.last_modified.timestamp_millis(),
            write: write.map(|write| write.as_ref().to_owned()),
        }
    }

    /// Whether it is only there to be removed: see [`super::publish`].
    pub(super) fn is_removed(&self) -> bool {
        self.write.as_deref() == Some(REMOVED)
    }

    /// Whether it was written by that call.
    pub(super) fn is_of(&self, write: &str) -> bool {
        self.write.as_deref() == Some(write)
    }
}

/// How a conditional write ended.
#[derive(Debug)]
pub(super) enum Put {
    Done,
    /// The precondition did not hold. `unsure`: an earlier try of this very call may be why.
    Refused {
        unsure: bool,
    },
}

/// What a PUT asks for.
pub(super) struct PutAsk<'a> {
    pub(super) what: &'a str,
    pub(super) mode: PutMode,
    /// Names the call, for looking up lost replies.
    pub(super) write: &'a str,
    pub(super) until: Option<Deadline>,
    /// Sent in place of the bytes, which the checksum stays of.
    pub(super) tampered: Option<Bytes>,
}

impl Client {
    pub(super) fn new(
        name: String,
        prefix: String,
        provider: Option<Provider>,
        stores: Stores,
        settings: &StoreSettings,
        handle: Handle,
    ) -> Self {
        Self {
            name,
            prefix,
            provider,
            objects: stores.objects,
            singly: stores.singly,
            multipart: stores.multipart,
            pages: stores.pages,
            uploads_by_hand: stores.uploads,
            settings: settings.clone(),
            handle,
            retries: Retries::new(settings, provider, stores.renewal),
            uploads: Gate::new(settings.concurrency),
            downloads: Gate::new(settings.concurrency),
            room: Arc::new(Room::new(settings.upload_bytes)),
            pace: Pace::new(settings.hedge),
            writing: Mutex::default(),
            random: RandomState::new(),
            writes: AtomicU64::new(0),
        }
    }

    /// What errors call an object.
    pub(super) fn place(&self, key: &str) -> String {
        format!("{}/{key}", self.name)
    }

    /// Where the store keeps a key. Errors: `unsafe_path` for what no object can be called.
    pub(super) fn path(&self, key: &str) -> Result<Path> {
        let whole = match self.prefix.is_empty() {
            true => key.to_owned(),
            false => format!("{}/{key}", self.prefix),
        };
        let refuse = |why: String| Error::new(Code::UnsafePath, why).at(self.place(key));
        if whole.len() > KEY_BYTES_MAX {
            return Err(refuse(format!(
                "the store's prefix and the key have over {KEY_BYTES_MAX} bytes"
            )));
        }
        Path::parse(whole).map_err(|error| refuse(error.to_string()))
    }

    /// The key of what the store lists; `None` for what is not below the prefix.
    pub(super) fn key<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let path = path.as_ref();
        match self.prefix.is_empty() {
            true => Some(path),
            false => path.strip_prefix(&self.prefix)?.strip_prefix('/'),
        }
    }

    /// A name for a write that no other has.
    pub(super) fn unique(&self) -> String {
        let count = self.writes.fetch_add(1, Ordering::Relaxed);
        let half =
            |salt: u64| self.random.hash_one((salt, count, Instant::now(), std::process::id()));
        format!("{:016x}{:016x}", half(0), half(1))
    }

    pub(super) fn ask<'a>(&self, what: &'a str, key: &str, bytes: u64) -> Ask<'a> {
        Ask { what, place: self.place(key), bytes, gate: None, until: None }
    }

    /// Looks without reading. One that is being removed is shown as it is.
    pub(super) async fn look(&self, key: &str) -> Result<Option<Looked>> {
        let path = self.path(key)?;
        let request = || {
            let options = GetOptions { head: true, ..GetOptions::default() };
            self.objects.get_opts(&path, options)
        };
        match self.retries.ask(&self.ask("cannot look at an object", key, 0), request).await {
            Ok((found, _)) => Ok(Some(Looked::of(&found.meta, &found.attributes))),
            Err(failed) if failed.kind == Kind::NotFound => Ok(None),
            Err(failed) => Err(failed.error),
        }
    }

    /// Reads a whole object; `None` where there is none, or one that is being removed.
    pub(super) async fn fetch(&self, key: &str, max_bytes: u64) -> Result<Option<(Bytes, Looked)>> {
        let path = self.path(key)?;
        let path = &path;
        // An object's size is not known before the answer, which more than `max_bytes` of is not read.
        let request = || async move {
            let found = self.objects.get_opts(path, GetOptions::default()).await?;
            let looked = Looked::of(&found.meta, &found.attributes);
            if looked.bytes > max_bytes {
                return Ok((Bytes::new(), looked));
            }
            Ok((whole(found).await?, looked))
        };
        let ask = self.ask("cannot read an object", key, max_bytes.min(PUT_BYTES_MAX));
        let (bytes, looked) = match self.retries.ask(&ask, request).await {
            Ok((found, _)) => found,
            Err(failed) if failed.kind == Kind::NotFound => return Ok(None),
            Err(failed) => return Err(failed.error),
        };
        if looked.is_removed() {
            return Ok(None);
        }
        if looked.bytes > max_bytes {
            let what = format!("object has {} bytes, at most {max_bytes} are read", looked.bytes);
            return Err(Error::new(Code::Unsupported, what).at(self.place(key)));
        }
        Ok(Some((bytes, looked)))
    }

    /// Writes a small object in one request.
    pub(super) async fn put_small(
        &self,
        key: &str,
        bytes: &Bytes,
        put: &PutAsk<'_>,
    ) -> Result<(Put, Note), Failed> {
        self.put_with(&self.retries, key, bytes, put).await
    }

    /// The same within other limits.
    pub(super) async fn put_with(
        &self,
        retries: &Retries,
        key: &str,
        bytes: &Bytes,
        put: &PutAsk<'_>,
    ) -> Result<(Put, Note), Failed> {
        let path = self.path(key).map_err(Failed::permanent)?;
        let request = || {
            let mut options = PutOptions { mode: put.mode.clone(), ..PutOptions::default() };
            let write = Attribute::Metadata(WRITE.into());
            options.attributes.insert(write, put.write.to_owned().into());
            if let Some(bytes) = &put.tampered {
                options.extensions.insert(Tampered(bytes.clone()));
            }
            self.objects.put_opts(&path, PutPayload::from(bytes.clone()), options)
        };
        let ask = Ask { until: put.until, ..self.ask(put.what, key, bytes.len() as u64) };
        match retries.ask(&ask, request).await {
            Ok((_, note)) => Ok((Put::Done, note)),
            Err(failed) if failed.kind == Kind::Precondition || gone(&put.mode, &failed) => {
                Ok((Put::Refused { unsure: failed.unsure }, Note::default()))
            }
            Err(failed) => Err(failed),
        }
    }

    /// Marks an object in a given state as removed; whether it still was in that state.
    pub(super) async fn mark_removed(&self, key: &str, looked: &Looked) -> Result<bool> {
        let put = PutAsk {
            what: "cannot mark an object as removed",
            mode: PutMode::Update(update(looked)),
            write: REMOVED,
            until: None,
            tampered: None,
        };
        let text = Bytes::from_static(b"Forebay is removing this object.\n");
        let put = self.put_small(key, &text, &put).await?;
        match put.0 {
            Put::Done => Ok(true),
            Put::Refused { unsure: false } => Ok(false),
            Put::Refused { unsure: true } => {
                Ok(self.look(key).await?.is_some_and(|there| there.is_removed()))
            }
        }
    }

    /// Deletes objects, whether they are there or not; the first error, after all were tried.
    pub(super) async fn delete(&self, keys: &[String]) -> Result<()> {
        let mut first = Ok(());
        for some in keys.chunks(MANY) {
            let many = some.len() > FEW && self.delete_from(&self.objects, some).await.is_ok();
            if !many {
                first = first.and(self.delete_from(&self.singly, some).await);
            }
        }
        first
    }

    async fn delete_from(&self, objects: &Arc<dyn ObjectStore>, keys: &[String]) -> Result<()> {
        let paths = keys.iter().map(|key| self.path(key)).collect::<Result<Vec<_>>>()?;
        let paths = &paths;
        let request = || async move {
            let paths = futures_util::stream::iter(paths.clone()).map(Ok).boxed();
            let mut deleted = objects.delete_stream(paths);
            let mut first = Ok(());
            while let Some(one) = deleted.next().await {
                match one {
                    Ok(_) | Err(Raw::NotFound { .. }) => {}
                    Err(error) => first = first.and(Err(error)),
                }
            }
            first
        };
        let key = keys.first().map_or("", String::as_str);
        let ask = self.ask("cannot remove an object", key, 0);
        Ok(self.retries.ask(&ask, request).await.map(drop)?)
    }
}

/// Whether what was to be replaced is not there any more, in the words of some stores.
fn gone(mode: &PutMode, failed: &Failed) -> bool {
    matches!(mode, PutMode::Update(_)) && failed.kind == Kind::NotFound
}

/// All bytes of an answer; an error where they are fewer or more than it said.
async fn whole(found: GetResult) -> object_store::Result<Bytes> {
    let size = found.meta.size;
    let bytes = found.bytes().await?;
    if bytes.len() as u64 == size { Ok(bytes) } else { Err(short(bytes.len() as u64, size)) }
}

/// An answer that broke off. It may go better next time.
pub(super) fn short(got: u64, wanted: u64) -> Raw {
    let what = format!("the answer has {got} bytes, {wanted} were to come");
    Raw::Generic { store: "object store", source: what.into() }
}

/// The state that a look found, as a precondition.
pub(super) fn update(looked: &Looked) -> UpdateVersion {
    UpdateVersion { e_tag: looked.e_tag.clone(), version: looked.version_id.clone() }
}

/// Entity tag, a NUL, version id.
fn version_of(e_tag: Option<&str>, id: Option<&str>) -> Version {
    Version(format!("{}\0{}", e_tag.unwrap_or(""), id.unwrap_or("")).into_bytes())
}

/// What [`version_of`] was made of; `None` for what it did not make.
pub(super) fn precondition_of(version: &Version) -> Option<UpdateVersion> {
    let text = std::str::from_utf8(&version.0).ok()?;
    let (e_tag, id) = text.split_once('\0')?;
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let update = UpdateVersion { e_tag: some(e_tag), version: some(id) };
    (update.e_tag.is_some() || update.version.is_some()).then_some(update)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_go_there_and_back() {
        let back = precondition_of(&version_of(Some("\"a\""), None)).unwrap();
        assert_eq!((back.e_tag.as_deref(), back.version), (Some("\"a\""), None));
        let back = precondition_of(&version_of(Some("a"), Some("7"))).unwrap();
        assert_eq!(back.version.as_deref(), Some("7"));
        for none in [&b""[..], b"\0", b"abc", b"\xff\0"] {
            assert!(precondition_of(&Version(none.to_vec())).is_none());
        }
    }
}
