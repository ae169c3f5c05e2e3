//! A structure as bytes of its own: a field of meshes and layouts, see `meshes`, and rows, see `rows`. In a manifest it
//! is spread over the tables.

use forebay_error::Result;

use super::meshes;
use super::rows::{RowReader, RowWriter};
use super::structure::Structure;
use super::wire::{Put, Take};

impl Structure {
    /// Appends it.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let meshes = meshes::encode(self.meshes(), self.layouts());
        out.put_varint(meshes.len() as u64);
        out.extend_from_slice(&meshes);
        let mut rows = RowWriter::default();
        self.values().iter().for_each(|named| rows.push(named, true, &[]));
        rows.finish(out);
    }

    /// Takes it, checked as a new one is. Errors: `invalid_metadata`, `structure_mismatch`.
    pub(crate) fn take(take: &mut Take<'_>) -> Result<Self> {
        let len = take.varint()?;
        let (meshes, layouts) = meshes::decode(take.take(len)?, take.place())?;
        let mut rows = RowReader::new(take)?;
        let mut values = Vec::new();
        while let Some((named, _)) = rows.next(take)? {
            values.push(named);
        }
        Self::from_parts(meshes, layouts, values)
    }
}
