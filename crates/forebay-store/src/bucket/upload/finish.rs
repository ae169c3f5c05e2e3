//! The requests around an upload's parts: its begin, its end, its end without success.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use object_store::PutMode;
use object_store::multipart::PartId;

use super::{Part, Shared, lock, part_len};
use crate::bucket::client::PutAsk;
use crate::bucket::failure::{Failed, Kind};
use crate::bucket::runtime::wait;

/// Most time that a drop spends on telling the store.
const ABORT_TIME: Duration = Duration::from_secs(10);

impl Shared {
    pub(super) async fn put_whole(&self, bytes: &Bytes) -> Result<()> {
        let write = self.client.unique();
        let put = PutAsk {
            what: "cannot upload an object",
            mode: PutMode::Overwrite,
            write: &write,
            until: None,
            tampered: None,
        };
        self.client.put_small(&self.key, bytes, &put).await?;
        Ok(())
    }

    pub(super) async fn begin(&self) -> Result<String> {
        let ask = self.client.ask("cannot begin an upload", &self.key, 0);
        let request = || self.client.multipart.create_multipart(&self.path);
        let (id, _) = self.client.retries.ask(&ask, request).await?;
        Ok(id)
    }

    /// Waits until nothing is on its way.
    pub(super) fn landed(&self) -> Result<Vec<PartId>> {
        let mut state = self.state();
        while state.flying > 0 && state.failed.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = &state.failed {
            return Err(error.again());
        }
        Ok(state.ids.iter_mut().filter_map(Option::take).collect())
    }

    pub(super) async fn complete(&self, parts: Vec<PartId>) -> Result<()> {
        let Some(id) = self.id.get() else {
            return if self.parts.is_empty() {
                self.put_whole(&Bytes::new()).await
            } else {
                Ok(())
            };
        };
        let Err(failed) = self.complete_once(id, parts).await? else { return Ok(()) };
        self.note_failure(&failed);
        // The store forgets an upload that is complete: no such upload may mean that an earlier try was heard.
        if failed.unsure || failed.kind == Kind::NotFound {
            let there = self.client.look(&self.key).await?;
            if there.is_some_and(|there| there.bytes == self.bytes && !there.is_removed()) {
                return Ok(());
            }
        }
        Err(failed.error)
    }

    /// The request for it.
    async fn complete_once(
        &self,
        id: &String,
        parts: Vec<PartId>,
    ) -> Result<std::result::Result<(), Failed>> {
        if let Some(begun) = &self.begun {
            let sums: Option<Vec<String>> =
                self.state().sums.iter_mut().map(Option::take).collect();
            let sums = sums.ok_or_else(|| self.incomplete(0))?;
            let kept = self.kept.load(Ordering::Acquire);
            let lens = |at| part_len(self.bytes, self.part_bytes, at);
            return Ok(self.client.complete_begun(&self.key, begun, (&sums, kept), &lens).await);
        }
        if parts.len() != self.parts.len() {
            return Err(self.incomplete(parts.len()));
        }
        let request = || self.client.multipart.complete_multipart(&self.path, id, parts.clone());
        let ask = self.client.ask("cannot complete an upload", &self.key, self.bytes / 64);
        Ok(self.client.retries.ask(&ask, request).await.map(drop))
    }

    fn incomplete(&self, parts: usize) -> Error {
        let what = format!("{parts} of {} parts were uploaded", self.parts.len());
        Error::new(Code::Io, what).at(self.client.place(&self.key))
    }

    pub(super) fn abort(&self) {
        for task in self.state().tasks.drain(..) {
            task.abort();
        }
        for part in &self.parts {
            *lock(part) = Part::Sent;
        }
        let Some(id) = self.id.get() else { return };
        if self.keeps && !self.spoiled.load(Ordering::Acquire) {
            return;
        }
        let aborted = wait(&self.client.handle, async {
            let request = || self.client.multipart.abort_multipart(&self.path, id);
            let ask = self.client.ask("cannot abort an upload", &self.key, 0);
            tokio::time::timeout(ABORT_TIME, self.client.retries.ask(&ask, request)).await
        });
        match aborted {
            Ok(Ok(_)) => {}
            Ok(Err(failed)) => tracing::warn!(error = %failed.error, "parts of an upload stay"),
            Err(_) => tracing::warn!(key = self.key, "parts of an upload stay: no answer in time"),
        }
    }
}
