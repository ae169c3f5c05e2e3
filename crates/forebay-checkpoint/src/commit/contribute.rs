//! A rank's part becomes one that others see. From then on they may commit, so what fails here has to be told by the
//! decision.

use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Published};

use super::attempt::{Attempt, FAIL_ROOM_BYTES};
use super::hints::Hint;
use super::record::{Decision, Failure, PartHead, encode};

impl Attempt {
    /// Contributes this rank's part: all its data files must be sealed. From here on the rank only
    /// [waits](Self::wait_or_commit).
    pub fn publish_part(&mut self, part: &[u8]) -> Result<()> {
        if self.own_part.is_some() {
            return Err(Error::new(Code::Usage, "a rank has one part"));
        }
        self.own_part = Some(part.to_vec());
        if self.spec.world == 1 {
            return Ok(());
        }
        self.check()?;
        let head = PartHead {
            attempt: self.begin.attempt.clone(),
            rank: self.spec.rank,
            world: self.spec.world,
            structure: self.begin.structure.clone(),
            epoch: self.spec.epoch,
        };
        let bytes = encode(&head, part)?;
        let staged = self.stage_part(&bytes)?;
        let key = self.record_of("part", self.spec.rank);
        self.note_made(key.clone());
        let published = self.root.store.publish(&staged, &key, &Expect::Absent);
        let there = || -> Result<bool> {
            Ok(self.root.store.get(&key, self.policy.parts_bytes_max)?.is_some())
        };
        match published {
            Ok(Published::Done { .. }) => {}
            Ok(Published::Lost) => {}
            // The reply to a publication that happened may be lost, and then its source is gone.
            Ok(Published::Withdrawn) if there()? => {}
            Err(error) if error.code() == Code::NotDurable => return self.take_back(error),
            Err(_) if there()? => {}
            Ok(Published::Withdrawn) => return Err(self.collected()),
            Err(error) => return Err(error),
        }
        self.tell(&Hint::Part);
        Ok(())
    }

    /// The part is there for the others to see and could not be made durable: the attempt fails, unless they were
    /// quicker and have decided to commit. Then that stands, with data and manifest that are durable.
    fn take_back(&mut self, error: Error) -> Result<()> {
        match self.abort(&Failure::of(self.spec.rank, &error)) {
            Ok(Decision::Commit(_)) => Ok(()),
            _ => Err(error),
        }
    }

    /// Writes the part into its room, or beside it where it is too large; returns where.
    fn stage_part(&mut self, bytes: &[u8]) -> Result<String> {
        let key = self.record_of("room", self.spec.rank);
        let room_bytes = self.spec.part_bytes.saturating_add(FAIL_ROOM_BYTES);
        match self.rooms.part.take() {
            Some(room) if bytes.len() as u64 <= room_bytes => {
                write_all_at(room.sink(), bytes, 0)?;
                room.seal()?;
            }
            _ => self.root.store.put(&key, bytes)?,
        }
        Ok(key)
    }
}
