//! The committer's side: from parts to a manifest.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_format::hex;
use sha2::{Digest, Sha256};

use super::gather::Gathered;
use super::head::{Header, Id};
use super::holders::Held;
use super::index::{self, PartEntry};
use super::info::Info;
use super::meshes;
use super::part::{Part, ValueRef};
use super::resolve::{Piece, Resolver};
use super::rows::RowWriter;
use super::structure::Structure;
use super::value::{Named, Value, shown};

/// Takes in the parts of all ranks, in the order of the ranks, and keeps of each only what the tables need.
pub struct Builder {
    info: Info,
    structure: Arc<Structure>,
    hash: [u8; 32],
    shared: Vec<Gathered>,
    own: Vec<(Named, Gathered)>,
    own_numbers: HashMap<String, u32>,
    files: HashSet<String>,
    parts: Vec<PartEntry>,
    parts_bytes: u64,
    parts_crc: u32,
    first_file: u64,
}

/// Everything in a manifest that comes before the parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The first bytes of the manifest; the parts follow, in the order of the ranks.
    pub bytes: Vec<u8>,
    /// Bytes of the manifest, parts included.
    pub total_bytes: u64,
    /// For each rank the first byte of its part in the manifest.
    pub part_offsets: Vec<u64>,
    /// SHA-256 of header, info, meshes, table and index: what `.metadata` names the manifest by. It vouches for the
    /// parts and the lists of holders too, whose checksums are in those.
    pub seal: [u8; 32],
}

impl Builder {
    /// A manifest of this attempt. `structure` is what the ranks agreed on, or empty; its hash goes into the info.
    pub fn new(mut info: Info, structure: Arc<Structure>) -> Self {
        let hash = structure.hash();
        let agreed = !structure.values().is_empty();
        info.structure = agreed.then(|| hex(&hash));
        let shared = structure.values().iter().map(|_| Gathered::Nothing).collect();
        Self {
            info,
            structure,
            hash,
            shared,
            own: Vec::new(),
            own_numbers: HashMap::new(),
            files: HashSet::new(),
            parts: Vec::new(),
            parts_bytes: 0,
            parts_crc: 0,
            first_file: 0,
        }
    }

    /// Takes in the part of the next rank.
    ///
    /// Errors: those of [`Part::decode`]; `structure_mismatch` for another structure, number of ranks or value under
    /// one name than the other ranks have; `invalid_metadata` for a part of another attempt or rank, a file that two
    /// ranks name, and chunks that do not fit their tensors; `overlap` where two ranks store one thing.
    pub fn add_part(&mut self, bytes: &[u8]) -> Result<()> {
        let rank = self.parts.len() as u32;
        let place = format!("the part of rank {rank}");
        let part = Part::decode(bytes, &place)?;
        self.check_part(&part, rank).map_err(|error| error.at(&place))?;
        for file in part.files() {
            if !self.files.insert(file.name.clone()) {
                let what = format!("two ranks name the file {}", shown(&file.name));
                return Err(Error::new(Code::InvalidMetadata, what).at(&place));
            }
        }
        let own = self.merge_own(&part).map_err(|error| error.at(&place))?;
        self.gather(&part, &own, &place)?;
        let data_bytes = part.chunks().iter().map(|chunk| chunk.data_bytes).sum();
        let (files, digest) = (part.files().len() as u64, Sha256::digest(bytes).into());
        self.parts.push(PartEntry {
            offset: self.parts_bytes,
            bytes: bytes.len() as u64,
            first_file: self.first_file,
            files,
            data_bytes,
            digest,
        });
        self.parts_crc = crc32_join(self.parts_crc, crc32(bytes), bytes.len() as u64);
        self.parts_bytes += bytes.len() as u64;
        self.first_file += files;
        Ok(())
    }

    fn check_part(&self, part: &Part, rank: u32) -> Result<()> {
        if part.rank() != rank || part.attempt() != self.info.attempt {
            let what = format!(
                "it is that of rank {} of attempt {}, rank {rank} of {} is due",
                part.rank(),
                shown(part.attempt()),
                shown(&self.info.attempt)
            );
            return Err(Error::new(Code::InvalidMetadata, what));
        }
        if part.world() != self.info.world_size {
            let what = format!("{} ranks, others have {}", part.world(), self.info.world_size);
            return Err(Error::new(Code::StructureMismatch, what));
        }
        let values = self.structure.values().len();
        match part.structure() {
            Some(shared) if shared.hash != self.hash || shared.values as usize != values => {
                let (this, others) = (hex(&shared.hash), hex(&self.hash));
                let what = format!("its structure is {this:.16}, that of the others {others:.16}");
                Err(Error::new(Code::StructureMismatch, what)
                    .hint("names, shapes, dtypes and layouts must be the same on all ranks"))
            }
            _ => Ok(()),
        }
    }

    /// Merges a part's own values into those of the others; gives the number of each.
    fn merge_own(&mut self, part: &Part) -> Result<Vec<u32>> {
        let mut numbers = Vec::with_capacity(part.own().len());
        for named in part.own() {
            let known = self.own_numbers.get(&named.name).copied();
            let number = known.unwrap_or(self.own.len() as u32);
            match self.own.get(number as usize) {
                Some((other, _)) if other != named => {
                    let what =
                        "another dtype, shape or kind than an earlier rank gave to that name";
                    return Err(Error::new(Code::StructureMismatch, what).at(format!(
                        "{} of rank {}",
                        shown(&named.name),
                        part.rank()
                    )));
                }
                Some(_) => {}
                None if self.structure.find(&named.name).is_some() => {
                    let what = "a value of a rank's own has the name of a shared one";
                    return Err(Error::new(Code::StructureMismatch, what).at(format!(
                        "{} of rank {}",
                        shown(&named.name),
                        part.rank()
                    )));
                }
                None => {
                    self.own_numbers.insert(named.name.clone(), number);
                    self.own.push((named.clone(), Gathered::Nothing));
                }
            }
            numbers.push(number);
        }
        Ok(numbers)
    }

    fn gather(&mut self, part: &Part, own: &[u32], place: &str) -> Result<()> {
        let structure = Arc::clone(&self.structure);
        let shared = structure.values().len() as u32;
        let value_of = |value: ValueRef| match value {
            ValueRef::Shared(number) => Some((number, structure.values().get(number as usize)?)),
            ValueRef::Own(number) => {
                Some((shared + own.get(number as usize)?, part.own().get(number as usize)?))
            }
        };
        let pieces = Resolver::new(part, &structure, place).pieces(value_of)?;
        let mut resolver = Resolver::new(part, &structure, place);
        for pieces in pieces.chunk_by(|a, b| a.key == b.key) {
            let Some(first) = pieces.first() else { continue };
            let chunk = part.chunks().get(first.chunk as usize);
            let Some((_, named)) = chunk.and_then(|chunk| value_of(chunk.value)) else { continue };
            let gathered = match first.key.checked_sub(shared) {
                None => self.shared.get_mut(first.key as usize),
                Some(own) => self.own.get_mut(own as usize).map(|(_, gathered)| gathered),
            };
            let Some(gathered) = gathered else { continue };
            add_pieces(gathered, named, pieces, part.rank(), &structure, &mut resolver)
                .map_err(|error| error.at(format!("{place}, {}", shown(&named.name))))?;
        }
        Ok(())
    }

    /// The tables, once all ranks' parts are in.
    ///
    /// Errors: `invalid_metadata` where a rank's part is missing; `hole`, `overlap` naming the tensor;
    /// `structure_mismatch` for an alias of nothing.
    pub fn finish(self) -> Result<Head> {
        let (parts, world) = (self.parts.len(), self.info.world_size);
        if parts as u64 != u64::from(world) {
            let what = format!("the part of rank {parts} of {world} is missing");
            return Err(Error::new(Code::InvalidMetadata, what));
        }
        let info = self.info.encode()?;
        let (meshes_list, layouts) = (self.structure.meshes(), self.structure.layouts());
        let meshes = meshes::encode(meshes_list, layouts);
        let index = index::encode(&self.parts);
        let (table, lists) =
            encode_table(&self.structure, self.shared, self.own, &self.own_numbers)?;
        let sections = [
            (Id::Info, &info),
            (Id::Meshes, &meshes),
            (Id::Table, &table),
            (Id::Index, &index),
            (Id::Holders, &lists),
        ];
        let mut places =
            sections.map(|(id, bytes)| (id, crc32(bytes), bytes.len() as u64)).to_vec();
        places.push((Id::Parts, self.parts_crc, self.parts_bytes));
        let header = Header::lay_out(&places);
        let mut bytes = header.encode();
        sections.iter().for_each(|(_, section)| bytes.extend_from_slice(section));
        // What is written must be readable: the reader's limits hold here too.
        Header::decode(&bytes, header.total(), "the new manifest")?;
        let eager = usize::try_from(header.eager_bytes()).unwrap_or(usize::MAX);
        let seal = Sha256::digest(bytes.get(..eager).unwrap_or_default()).into();
        let first = bytes.len() as u64;
        let part_offsets = self.parts.iter().map(|part| first + part.offset).collect();
        Ok(Head { bytes, total_bytes: header.total(), part_offsets, seal })
    }
}

fn add_pieces<'a>(
    gathered: &mut Gathered,
    named: &'a Named,
    pieces: &[Piece],
    rank: u32,
    structure: &Structure,
    resolver: &mut Resolver<'a>,
) -> Result<()> {
    let Value::Tensor(tensor) = &named.value else {
        return pieces.iter().try_for_each(|_| gathered.whole(rank, named, structure));
    };
    if let [piece] = pieces
        && piece.region.is_whole(&tensor.shape)
        && !piece.implied
    {
        return gathered.whole(rank, named, structure);
    }
    if pieces.iter().all(|piece| piece.implied) {
        let boxes = resolver.boxes(tensor)?.unwrap_or_default();
        if boxes.len() == pieces.len() {
            return gathered.shard(rank, tensor, &boxes, structure);
        }
    }
    for piece in pieces.iter().filter(|piece| !piece.region.is_empty()) {
        gathered.region(rank, tensor, &piece.region, structure)?;
    }
    Ok(())
}

/// The table and the lists of holders.
fn encode_table(
    structure: &Structure,
    shared: Vec<Gathered>,
    own: Vec<(Named, Gathered)>,
    own_numbers: &HashMap<String, u32>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let shared = structure.values().iter().zip(shared).map(|(named, held)| (named, true, held));
    let find = |name: &String| match own_numbers.get(name) {
        Some(&number) => own.get(number as usize).map(|(named, _)| named),
        None => structure.find(name).map(|(_, named)| named),
    };
    for (named, _) in &own {
        if let Value::Alias { of } = &named.value
            && find(of).is_none_or(|other| matches!(other.value, Value::Alias { .. }))
        {
            let what = format!("an alias of {}, which no rank stores", shown(of));
            return Err(Error::new(Code::StructureMismatch, what).at(shown(&named.name)));
        }
    }
    let (names, held): (Vec<Named>, Vec<Gathered>) = own.into_iter().unzip();
    let mut rows: Vec<(&Named, bool, Gathered)> = shared.collect();
    rows.extend(names.iter().zip(held).map(|(named, held)| (named, false, held)));
    rows.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let (mut writer, mut lists, mut tail) = (RowWriter::default(), Vec::new(), Vec::new());
    for (named, in_structure, gathered) in rows {
        tail.clear();
        if !matches!(named.value, Value::Alias { .. }) {
            let held: Held = gathered
                .finish(named, structure, &mut lists)
                .map_err(|error| error.at(shown(&named.name)))?;
            held.put(&mut tail);
        }
        writer.push(named, in_structure, &tail);
    }
    let mut table = Vec::new();
    writer.finish(&mut table);
    Ok((table, lists))
}
