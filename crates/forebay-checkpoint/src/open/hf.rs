//! From the headers of safetensors shards to the model.

use super::files::Listing;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::model::{Chunk, DataFile, DataPlace, Entry, Kind};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::hf::{ShardPart, ShardedTensor, assemble, is_shard};
use forebay_format::index::MAX_FILES;
use forebay_format::safetensors::read_header;
use forebay_format::{Folder, parallel, shown};

/// Opens a folder of shards; `None` where its files hold whole tensors, as any model's do.
pub(super) fn open(folder: &Folder, listing: &Listing) -> Result<Option<Checkpoint>> {
    if listing.safetensors.len() > MAX_FILES {
        let what = format!("more than {MAX_FILES} files *.safetensors");
        return Err(Error::new(Code::Unsupported, what).at(shown(folder.path())));
    }
    let names: Vec<String> = listing.safetensors.iter().cloned().collect();
    let headers = parallel::map(&names, |name| {
        let file = folder.open(name)?;
        Ok((read_header(&file)?, file.size()))
    });
    let headers: Vec<_> = headers.into_iter().collect::<Result<_>>()?;
    if !headers.iter().any(|(header, _)| is_shard(header)) {
        return Ok(None);
    }
    let sizes = headers.iter().map(|(_, size)| Some(*size));
    let files = names.iter().zip(sizes).map(|(name, bytes)| DataFile { name: name.clone(), bytes });
    let files = files.collect();
    let mut warnings = Vec::new();
    for (name, (header, _)) in names.iter().zip(&headers) {
        warnings.extend(
            header
                .warnings
                .iter()
                .map(|text| Warning { concern: Concern::Other, text: format!("{name:?}: {text}") }),
        );
    }
    let named: Vec<_> =
        names.into_iter().zip(headers).map(|(name, (header, _))| (name, header)).collect();
    let tensors = assemble(&named).map_err(|error| error.at(shown(folder.path())))?;
    let entries = tensors.into_iter().map(entry).collect();
    Checkpoint::new(Origin::HfShards, entries, files, folder, warnings).map(Some)
}

fn entry(tensor: ShardedTensor) -> Entry {
    let chunk = |part: ShardPart| Chunk {
        region: part.region,
        file: part.file as u32,
        offset: part.offset,
        length: part.bytes,
        transforms: Vec::new(),
        data: Some(DataPlace { offset: part.offset, bytes: part.bytes, crcs: Vec::new() }),
    };
    let chunks = tensor.parts.into_iter().map(chunk).collect();
    let kind = Kind::Tensor { dtype: tensor.dtype, shape: tensor.shape, chunks };
    Entry { name: tensor.name, path: Vec::new(), kind }
}
