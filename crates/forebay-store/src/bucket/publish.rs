//! Publication: a small object gets its real key, in one step.
//!
//! A bucket cannot rename. What was staged is read and written to the destination by one conditional PUT, create only
//! or replace only that version; that PUT is the instant of publication. It carries a name of the call in its user
//! metadata, so that after a lost reply a look at the destination tells whether it was this call's doing, also where
//! somebody else published the same bytes.
//!
//! Then the staged object goes, and must not take with it what somebody else put there meanwhile: a bucket's DELETE
//! has no condition on most stores. So it is first replaced, by a conditional PUT, by a mark that says that it is being
//! removed, and then deleted. Marks count as absent everywhere here: they are not read, not listed, and a key with one
//! may be taken. Who is killed in between leaves a mark of 33 bytes; after an hour it is listed, so that it can be
//! collected.
//!
//! What a bucket cannot give: a collector that removes a staged object *while* it is being published does not keep it
//! from appearing. So a publication ends, or is given up, within [`PUBLISH_TIME`] of having read what was staged, and
//! [`Abilities::publish_time`](crate::Abilities) tells collectors to wait as long before they look again.

use std::time::Duration;

use bytes::Bytes;
use forebay_error::Result;
use object_store::{PutMode, UpdateVersion};
use tokio::time::Instant;

use super::client::{Client, PUT_BYTES_MAX, Put, PutAsk, precondition_of, update};
use crate::object::{Expect, Published};

/// From reading what is staged to the last byte of the last try. 60 s suffice for 600 MB at 10 MB/s.
pub(super) const PUBLISH_TIME: Duration = Duration::from_secs(60);
/// Marks that may be found at a destination one after the other.
const MARKS_MAX: u32 = 8;

impl Client {
    /// Creates a small object; false where the key is taken.
    pub(super) async fn create_small(&self, key: &str, bytes: &Bytes) -> Result<bool> {
        self.place_small(key, bytes, PutMode::Create, None, "cannot create an object").await
    }

    pub(super) async fn publish_small(
        &self,
        staged: &str,
        to: &str,
        expect: &Expect,
    ) -> Result<Published> {
        let until = Some(Instant::now() + PUBLISH_TIME);
        let Some((bytes, looked)) = self.fetch(staged, PUT_BYTES_MAX).await? else {
            return Ok(Published::Withdrawn);
        };
        let mode = match expect {
            Expect::Absent => PutMode::Create,
            Expect::Version(version) => match precondition_of(version) {
                Some(update) => PutMode::Update(update),
                None => return Ok(Published::Lost),
            },
        };
        if !self.place_small(to, &bytes, mode, until, "cannot publish").await? {
            return Ok(Published::Lost);
        }
        // Published it is; what stays staged does no harm but to be collected.
        if let Err(error) = self.remove_exactly(staged, &looked).await {
            tracing::warn!(%error, "published, but what was staged is still there");
            return Err(error.hint("it is published: look at the destination"));
        }
        Ok(Published::Done { durable: true })
    }

    /// One conditional PUT, and looks where its outcome is not plain; whether the object is there by our doing.
    async fn place_small(
        &self,
        key: &str,
        bytes: &Bytes,
        mut mode: PutMode,
        until: Option<Instant>,
        what: &str,
    ) -> Result<bool> {
        let creates = mode == PutMode::Create;
        let write = self.unique();
        for _ in 0..MARKS_MAX {
            let put = PutAsk { what, mode, write: &write, until, tampered: None };
            let unsure = match self.put_small(key, bytes, &put).await {
                Ok((Put::Done, _)) => return Ok(true),
                Ok((Put::Refused { unsure }, _)) => unsure,
                Err(failed) if failed.unsure => {
                    let there = self.look(key).await.ok().flatten();
                    return match there.is_some_and(|there| there.is_of(&write)) {
                        true => Ok(true),
                        false => Err(failed.error),
                    };
                }
                Err(failed) => return Err(failed.error),
            };
            if !unsure && !creates {
                return Ok(false);
            }
            mode = match self.look(key).await? {
                Some(there) if there.is_of(&write) => return Ok(true),
                // Taken by a mark, which is nobody's; or freed since: the same once more.
                Some(there) if creates && there.is_removed() => PutMode::Update(update(&there)),
                None if creates => PutMode::Create,
                _ => return Ok(false),
            };
        }
        Ok(false)
    }

    /// Removes an object if it still is in the state that was seen.
    async fn remove_exactly(&self, key: &str, looked: &super::client::Looked) -> Result<()> {
        let UpdateVersion { e_tag, version } = update(looked);
        if e_tag.is_none() && version.is_none() {
            return self.delete(&[key.to_owned()]).await;
        }
        if self.mark_removed(key, looked).await? {
            self.delete(&[key.to_owned()]).await?;
        }
        Ok(())
    }
}
