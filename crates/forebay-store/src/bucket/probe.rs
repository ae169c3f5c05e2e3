//! What a store honours, found out by asking it.
//!
//! S3's interface has many makers, and some take a precondition or a checksum and ignore it. So a store is tried before
//! its first change, under keys that are nobody's (temporary names, which collectors know): a create of a taken key
//! must be refused, and of several at once exactly one may win; a replacement of a stale version must be refused; bytes
//! that are not those of their checksum must be refused; what is deleted must be gone. User metadata must come back,
//! because lost replies are looked up by it. What fails is missing from the abilities, and the store says no
//! (`unsupported`) to what needs it. Fourteen small requests, once a store and process; a store that is only read is
//! never asked.

use bytes::Bytes;
use forebay_error::{Error, Result};
use futures_util::future::join_all;
use object_store::PutMode;

use super::client::{Client, Put, PutAsk, update};
use super::failure::Kind;
use super::place::Provider;
use super::publish::PUBLISH_TIME;
use crate::key::TEMP_PREFIX;
use crate::object::Abilities;

/// Creates of one key at once. A server that looks, then writes, was seen to let two or more of 16 win every time.
const RACERS: usize = 8;

impl Client {
    /// Tries the store. Errors are of the store: it could not be asked, or may not be written.
    pub(super) async fn probe(&self) -> Result<Abilities> {
        let keys: Vec<String> =
            (0..3).map(|_| format!("{TEMP_PREFIX}probe-{}", self.unique())).collect();
        let found = self.probe_with(&keys).await;
        let deleted = self.delete(&keys).await;
        let abilities = found?;
        deleted?;
        if self.look(&keys[0]).await?.is_some() {
            tracing::warn!(store = self.name, "the store does not delete, or not at once");
        }
        self.tell(&abilities);
        Ok(abilities)
    }

    async fn probe_with(&self, keys: &[String]) -> Result<Abilities> {
        let (key, race, bad) = (&keys[0], &keys[1], &keys[2]);
        let first = self.unique();
        let (_, note) = self.try_put(key, b"1", PutMode::Create, &first).await?;
        let refused = self.try_put(key, b"2", PutMode::Create, &self.unique()).await?.0;
        let before = self.look(key).await?;
        let keeps_names = before.as_ref().is_some_and(|looked| looked.is_of(&first));
        let mut replaces = false;
        if let Some(before) = before.filter(|looked| looked.e_tag.is_some()) {
            let stale = || PutMode::Update(update(&before));
            let fresh = self.try_put(key, b"3", stale(), &self.unique()).await?.0;
            let late = self.try_put(key, b"4", stale(), &self.unique()).await?.0;
            replaces = fresh && !late;
        }
        let racers = (0..RACERS).map(|at| {
            let bytes = [b'0' + at as u8];
            async move { self.try_put(race, &bytes, PutMode::Create, &self.unique()).await }
        });
        let ends = join_all(racers).await.into_iter().collect::<Result<Vec<_>>>()?;
        let winners = ends.iter().filter(|(done, _)| *done).count();
        Ok(Abilities {
            create_if_absent: !refused && winners == 1 && keeps_names,
            replace_if_version: replaces && keeps_names,
            durable_publish: true,
            reserves_space: false,
            rejects_bad_checksums: self.rejects_bad_checksum(bad).await?,
            // Of any of them: a reply that got lost had none.
            returns_checksums: note.checksum == Some(true)
                || ends.iter().any(|(_, note)| note.checksum == Some(true)),
            publish_time: PUBLISH_TIME,
        })
    }

    /// Whether the store wrote it: what is refused after a reply got lost is looked up by the name of the write.
    async fn try_put(
        &self,
        key: &str,
        bytes: &[u8],
        mode: PutMode,
        write: &str,
    ) -> Result<(bool, super::wire::Note)> {
        let what = "cannot try what the store honours";
        let put = PutAsk { what, mode, write, until: None, tampered: None };
        let (put, note) = self.put_small(key, &Bytes::copy_from_slice(bytes), &put).await?;
        let done = match put {
            Put::Done => true,
            Put::Refused { unsure: false } => false,
            Put::Refused { unsure: true } => {
                self.look(key).await?.is_some_and(|there| there.is_of(write))
            }
        };
        Ok((done, note))
    }

    async fn rejects_bad_checksum(&self, key: &str) -> Result<bool> {
        if self.provider != Some(Provider::S3) {
            return Ok(false);
        }
        let put = PutAsk {
            what: "cannot try whether checksums are compared",
            mode: PutMode::Overwrite,
            write: "tampered",
            until: None,
            tampered: Some(Bytes::from_static(b"tampered")),
        };
        let once = super::settings::StoreSettings { retries: 0, ..self.settings.clone() };
        let retries =
            super::retry::Retries::new(&once, self.provider, super::renewal::Renewal::new());
        let mut tries = 0;
        loop {
            tries += 1;
            let bytes = Bytes::from_static(b"original");
            match self.put_with(&retries, key, &bytes, &put).await {
                Ok(_) => return Ok(false),
                // It said that of the bytes, as it should.
                Err(failed) if failed.status == Some(400) => return Ok(true),
                // It took them, and gave back their own checksum, which is found out here.
                Err(failed) if failed.status.is_some_and(|status| status < 300) => {
                    return Ok(false);
                }
                Err(failed) if tries > self.settings.retries => return Err(Error::from(failed)),
                Err(failed) if matches!(failed.kind, Kind::Transient { .. }) => {
                    retries.rest(tries).await;
                }
                Err(failed) => return Err(Error::from(failed)),
            }
        }
    }

    fn tell(&self, found: &Abilities) {
        let (store, abilities) = (&self.name, found);
        if !found.create_if_absent || !found.replace_if_version {
            tracing::warn!(
                store,
                ?abilities,
                "the store ignores preconditions: no checkpoints here"
            );
        } else if !found.rejects_bad_checksums && self.provider == Some(Provider::S3) {
            tracing::warn!(store, ?abilities, "the store does not compare checksums of uploads");
        } else {
            tracing::debug!(store, ?abilities, "probed");
        }
    }
}
