//! What a manifest says about the save as a whole.

use forebay_error::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use super::limits::MAX_INFO_BYTES;

/// The save as a whole: a JSON object in the manifest. Keys that are not known are passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// The attempt that was committed.
    pub attempt: String,
    /// The run that it belongs to.
    pub run: String,
    /// The epoch of the run's writer.
    pub epoch: u64,
    /// The step.
    pub step: u64,
    /// The step before it in this run's line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_step: Option<u64>,
    /// Ranks of the job: each has a part.
    pub world_size: u32,
    /// The structure hash in hexadecimal digits, where the ranks agreed on a structure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structure: Option<String>,
    /// Version of Forebay that wrote it.
    #[serde(default)]
    pub forebay: String,
    /// Version of torch, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torch: Option<String>,
    /// Version of Python, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// The host of the committer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The user of the committer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// When it was committed, by the committer's clock: for people, never compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
}

impl Info {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self).map_err(|error| {
            Error::new(Code::Internal, "cannot write a manifest's info as JSON").with_source(error)
        })?;
        match bytes.len() as u64 <= MAX_INFO_BYTES {
            true => Ok(bytes),
            false => Err(Error::new(Code::Unsupported, "more than 1 MiB of info in a manifest")),
        }
    }

    pub(crate) fn decode(bytes: &[u8], place: &str) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|error| {
            let what = "the info of a manifest is not the JSON that it should be";
            Error::new(Code::InvalidMetadata, what).at(place).with_source(error)
        })
    }
}
