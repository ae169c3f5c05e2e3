//! Ranged reads of an object in a bucket.
//!
//! A read is one or more GETs with `If-Match`, so that all ranges are of one state of the object: another one is
//! `file_changed`, never a mix. Ranges longer than `range_bytes` are split and asked for at once; stragglers are asked
//! for twice ([`hedge`](super::hedge)). An answer with fewer bytes than asked for is asked for again.
//!
//! **Copies.** The kernel's socket buffer is read into frames, and a frame is copied once, straight into the caller's
//! buffer, on the caller's thread; bytes of a second request that wins, and of several near ranges that share a request
//! ([`ranges`]), are copied twice.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use futures_util::future::{Either, select, try_join_all};
use futures_util::{StreamExt, pin_mut};
use object_store::path::Path;
use object_store::{Error as Raw, GetOptions, GetRange, GetResult};

use super::client::{Client, Looked, short};
use super::failure::Kind;
use super::ranges::{self, Group};
use super::retry::Ask;
use super::runtime::wait;
use super::upload::into_io;

/// An object that was opened for reading.
pub(super) struct Source {
    client: Arc<Client>,
    key: String,
    path: Path,
    opened: Looked,
}

impl Source {
    pub(super) async fn open(client: &Arc<Client>, key: &str) -> Result<Self> {
        let opened = client.look(key).await?.filter(|looked| !looked.is_removed());
        let Some(opened) = opened else {
            return Err(Error::new(Code::NotFound, "no such object").at(client.place(key)));
        };
        let path = client.path(key)?;
        Ok(Self { client: Arc::clone(client), key: key.to_owned(), path, opened })
    }

    fn changed(&self) -> Error {
        let what = "object was written, replaced or removed while it was in use";
        Error::new(Code::FileChanged, what).at(self.client.place(&self.key))
    }

    /// Fills a buffer from one range.
    async fn fetch(&self, into: &mut [u8], offset: u64) -> Result<()> {
        let len = into.len() as u64;
        let start = Instant::now();
        let _pass = self.client.downloads.enter().await;
        let Some(delay) = self.client.pace.delay(len) else {
            self.fetch_once(into, offset).await?;
            self.done(len, start.elapsed());
            return Ok(());
        };
        let mut second = Vec::new();
        let won = {
            let first = self.fetch_once(into, offset);
            let again = self.fetch_again(&mut second, len, offset, delay);
            pin_mut!(first, again);
            match select(first, again).await {
                Either::Left((first, _)) => first.map(|()| false)?,
                Either::Right((Ok(true), _)) => true,
                // No leave to ask, or no luck: the first decides.
                Either::Right((_, first)) => first.await.map(|()| false)?,
            }
        };
        if won {
            into.copy_from_slice(&second);
        }
        self.done(len, start.elapsed());
        Ok(())
    }

    /// Near ranges by one request.
    async fn fetch_group(&self, group: Group<'_, '_>) -> Result<()> {
        let (start, bytes) = (group.range.start, group.range.end - group.range.start);
        if let [(_, into)] = group.parts {
            return self.fetch(into, start).await;
        }
        let mut whole = vec![0; usize::try_from(bytes).unwrap_or(0)];
        self.fetch(&mut whole, start).await?;
        for (offset, into) in group.parts {
            let from = usize::try_from(*offset - start).unwrap_or(usize::MAX);
            let part = from.checked_add(into.len()).and_then(|end| whole.get(from..end));
            let lost = || Error::new(Code::Internal, "a range outside of its request");
            into.copy_from_slice(part.ok_or_else(lost)?);
        }
        Ok(())
    }

    fn done(&self, bytes: u64, time: Duration) {
        self.client.downloads.moved(bytes);
        self.client.pace.took(bytes, time);
    }

    /// Waits, then asks for the same range, if there is leave to.
    async fn fetch_again(
        &self,
        into: &mut Vec<u8>,
        len: u64,
        offset: u64,
        delay: Duration,
    ) -> Result<bool> {
        tokio::time::sleep(delay).await;
        let Some(_pass) = self.client.downloads.try_enter() else { return Ok(false) };
        if !self.client.pace.may_ask_again() {
            return Ok(false);
        }
        tracing::debug!(key = self.key, offset, ?delay, "asked for a second time");
        into.resize(usize::try_from(len).unwrap_or(0), 0);
        self.fetch_once(into, offset).await?;
        Ok(true)
    }

    /// One range, with retries.
    async fn fetch_once(&self, into: &mut [u8], offset: u64) -> Result<()> {
        let range = offset..offset + into.len() as u64;
        let ask = Ask {
            gate: Some(&self.client.downloads),
            ..self.client.ask("cannot read a range of an object", &self.key, into.len() as u64)
        };
        // Tries come one after the other, and each writes the buffer from its start.
        let into = tokio::sync::Mutex::new(into);
        let request = || async {
            let mut into = into.lock().await;
            let options = GetOptions {
                if_match: self.opened.e_tag.clone(),
                version: self.opened.version_id.clone(),
                range: Some(GetRange::Bounded(range.clone())),
                ..GetOptions::default()
            };
            let found = self.client.objects.get_opts(&self.path, options).await?;
            self.check(&found, &range)?;
            copy(found, &mut into).await
        };
        match self.client.retries.ask(&ask, request).await {
            Ok(_) => Ok(()),
            Err(failed) if matches!(failed.kind, Kind::Precondition | Kind::NotFound) => {
                Err(self.changed())
            }
            // A shorter object has no such range, and some servers look at that first.
            Err(failed) if failed.kind == Kind::Permanent => match self.is_unchanged().await {
                Ok(false) => Err(self.changed()),
                _ => Err(failed.error),
            },
            Err(failed) => Err(failed.error),
        }
    }

    /// Whether the object is still the one that was opened.
    async fn is_unchanged(&self) -> Result<bool> {
        let now = self.client.look(&self.key).await?;
        let opened = &self.opened;
        let same = |now: &Looked| {
            let dated = opened.e_tag.is_some() || now.modified_ms == opened.modified_ms;
            now.version == opened.version && now.bytes == opened.bytes && dated
        };
        Ok(now.as_ref().is_some_and(same))
    }

    /// Some servers ignore `If-Match`: what they send says of which state it is.
    fn check(&self, found: &GetResult, range: &Range<u64>) -> object_store::Result<()> {
        let same = self.opened.e_tag == found.meta.e_tag && self.opened.bytes == found.meta.size;
        if !same {
            let source = "another state of the object".into();
            return Err(Raw::Precondition { path: self.key.clone(), source });
        }
        match found.range == *range {
            true => Ok(()),
            false => Err(short(found.range.end - found.range.start, range.end - range.start)),
        }
    }
}

/// Copies an answer as it comes.
async fn copy(found: GetResult, into: &mut [u8]) -> object_store::Result<()> {
    let wanted = into.len() as u64;
    let mut stream = found.into_stream();
    let mut done = 0;
    while let Some(frame) = stream.next().await {
        let frame = frame?;
        let Some(target) = into.get_mut(done..done + frame.len()) else {
            return Err(short((done + frame.len()) as u64, wanted));
        };
        target.copy_from_slice(&frame);
        done += frame.len();
    }
    if done as u64 == wanted { Ok(()) } else { Err(short(done as u64, wanted)) }
}

impl RangeSource for Source {
    fn name(&self) -> String {
        self.client.place(&self.key)
    }

    fn len(&self) -> u64 {
        self.opened.bytes
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = usize::try_from(self.opened.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let count = into.len().min(left);
        let Some(into) = into.get_mut(..count).filter(|into| !into.is_empty()) else {
            return Ok(0);
        };
        let range_bytes = usize::try_from(self.client.settings.range_bytes).unwrap_or(usize::MAX);
        let range_bytes = range_bytes.max(1);
        let ranges = into
            .chunks_mut(range_bytes)
            .enumerate()
            .map(|(at, chunk)| self.fetch(chunk, offset + (at * range_bytes) as u64));
        wait(&self.client.handle, try_join_all(ranges)).map_err(into_io)?;
        Ok(count)
    }

    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        let groups = ranges::groups(parts, self.opened.bytes)?;
        let reads = groups.into_iter().map(|group| self.fetch_group(group));
        wait(&self.client.handle, try_join_all(reads)).map_err(into_io)?;
        Ok(())
    }

    fn check_unchanged(&self) -> Result<()> {
        match wait(&self.client.handle, self.is_unchanged())? {
            true => Ok(()),
            false => Err(self.changed()),
        }
    }
}
