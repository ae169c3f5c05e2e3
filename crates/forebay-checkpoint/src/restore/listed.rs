//! Checkpoints that are read as one list: torch's, and its Hugging Face writer's.

use forebay_error::Result;
use forebay_tensor::Region;

use super::{Item, no_such};
use crate::model::{Entry, Kind};
use crate::open::Checkpoint;

/// A checkpoint, all of whose entries are known.
pub(super) struct Listed {
    pub(super) checkpoint: Checkpoint,
    pub(super) items: Vec<Item>,
    pub(super) warnings: Vec<String>,
}

impl Listed {
    pub(super) fn new(checkpoint: Checkpoint) -> Self {
        let items = checkpoint.entries.iter().map(|entry| Item {
            name: entry.name.clone(),
            path: entry.path.clone(),
            tensor: match &entry.kind {
                Kind::Tensor { dtype, shape, .. } => Some((*dtype, shape.clone())),
                Kind::Object { .. } => None,
            },
        });
        let items = items.collect();
        let warnings = checkpoint.warnings.iter().map(|warning| warning.text.clone()).collect();
        Self { checkpoint, items, warnings }
    }

    pub(super) fn item(&self, name: &str) -> Result<&Item> {
        let item = self.checkpoint.number(name).and_then(|number| self.items.get(number));
        item.ok_or_else(|| no_such(name, self.checkpoint.folder()))
    }

    pub(super) fn entry(&self, name: &str) -> Result<&Entry> {
        self.checkpoint.get(name).ok_or_else(|| no_such(name, self.checkpoint.folder()))
    }

    pub(super) fn is_one(&self, one: &str, other: &str) -> bool {
        let chunks = |name| self.checkpoint.get(name).map(Entry::chunks);
        one == other || chunks(one) == chunks(other) && chunks(one).is_some_and(|c| !c.is_empty())
    }

    pub(super) fn regions(&self, name: &str) -> Result<Vec<Region>> {
        match &self.entry(name)?.kind {
            Kind::Tensor { chunks, .. } => {
                Ok(chunks.iter().map(|chunk| chunk.region.clone()).collect())
            }
            Kind::Object { .. } => Ok(Vec::new()),
        }
    }
}
