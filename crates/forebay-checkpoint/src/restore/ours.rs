//! Checkpoints of our own: names come from the head of the manifest, places from the parts that are needed.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::{Folder, Model};
use forebay_tensor::Region;

use super::{Item, buffer, no_side_file, no_such, wrong};
use crate::manifest::{Manifest, Value};
use crate::model::{Chunk, DataFile, Entry, Kind};
use crate::open::{Checkpoint, ours};

/// An open manifest and the folder that it is about.
pub(super) struct Ours {
    folder: Folder,
    manifest: Manifest,
    /// By the numbers of the manifest's table.
    pub(super) items: Vec<Item>,
    pub(super) warnings: Vec<String>,
}

impl Ours {
    pub(super) fn new(folder: &Folder, manifest: Manifest) -> Result<Self> {
        let mut items = Vec::with_capacity(manifest.table().values().len());
        for named in manifest.table().values() {
            let tensor = match manifest.is_object(&named.value) {
                true => None,
                false => {
                    let (dtype, shape) = manifest.tensor(&named.name)?;
                    Some((dtype, shape.to_vec()))
                }
            };
            items.push(Item { name: named.name.clone(), path: named.path.clone(), tensor });
        }
        let warnings = ours::warnings(folder, &manifest)?;
        let warnings = warnings.into_iter().map(|warning| warning.text).collect();
        Ok(Self { folder: folder.clone(), manifest, items, warnings })
    }

    pub(super) fn no_such(&self, name: &str) -> Error {
        no_such(name, self.folder.path())
    }

    pub(super) fn item(&self, name: &str) -> Result<&Item> {
        let number = self.manifest.table().find(name).map(|(number, _)| number as usize);
        let item = number.and_then(|number| self.items.get(number));
        item.ok_or_else(|| self.no_such(name))
    }

    pub(super) fn regions(&self, name: &str) -> Result<Vec<Region>> {
        match self.item(name)?.tensor {
            None => Ok(Vec::new()),
            Some(_) => self.manifest.regions_of(name),
        }
    }

    pub(super) fn is_one(&self, one: &str, other: &str) -> bool {
        let stored = |name| match self.manifest.value(name).map(|named| &named.value) {
            Some(Value::Alias { of }) => of.clone(),
            _ => String::from(name),
        };
        stored(one) == stored(other)
    }

    /// Whether the stored chunks that share elements with these regions have the same checksums in two tensors; `None`
    /// where that cannot be said: they are cut differently, or have none.
    pub(super) fn same_sums(&self, one: &Item, other: &Item, regions: &[Region]) -> Option<bool> {
        if one.tensor != other.tensor {
            return None;
        }
        let wants = |item| regions.iter().map(move |region| (item, region));
        let (one, other) = (one.name.as_str(), other.name.as_str());
        let wants: Vec<(&str, &Region)> = wants(one).chain(wants(other)).collect();
        // What is wrong here is told by who reads it.
        let found = self.manifest.find(&wants).ok()?;
        let (one, other) = found.chunks.split_at_checked(regions.len())?;
        let (one, other) = (sums(one)?, sums(other)?);
        one.keys().eq(other.keys()).then(|| one == other)
    }

    /// A model of these regions, and of nothing else.
    pub(super) fn model_for(&self, wants: &[(usize, Region)]) -> Result<Model> {
        let mut named = Vec::with_capacity(wants.len());
        for (number, region) in wants {
            let Some(item) = self.items.get(*number) else {
                return Err(Error::new(Code::Usage, format!("there is no entry {number}")));
            };
            if item.tensor.is_none() {
                let error = Error::new(Code::Usage, "is an object, no tensor");
                return Err(error
                    .at(self.folder.path().display())
                    .within(format!("{:?}", item.name)));
            }
            named.push((item.name.as_str(), region));
        }
        let found = self.manifest.find(&named)?;
        // Several regions of one tensor are one entry.
        let mut places: HashMap<usize, usize> = HashMap::new();
        let mut all: Vec<(Item, Vec<Chunk>)> = Vec::new();
        let mut regions = Vec::with_capacity(wants.len());
        for ((number, region), chunks) in wants.iter().zip(found.chunks) {
            let place = *places.entry(*number).or_insert(all.len());
            if place == all.len() {
                all.extend(self.items.get(*number).map(|item| (item.clone(), Vec::new())));
            }
            if let Some((_, own)) = all.get_mut(place) {
                own.extend(chunks);
            }
            regions.push((place, region.clone()));
        }
        let entries = all.into_iter().filter_map(|(item, chunks)| entry(item, chunks)).collect();
        ours::some_of(&self.manifest, &self.folder, entries, found.files)?.model_for(&regions)
    }

    /// A checkpoint of one object.
    pub(super) fn object(&self, name: &str) -> Result<Checkpoint> {
        self.objects(&[name])
    }

    /// A checkpoint of some objects. One that is wanted twice is in it once.
    pub(super) fn objects(&self, names: &[&str]) -> Result<Checkpoint> {
        let mut entries = Vec::with_capacity(names.len());
        let mut files = BTreeMap::new();
        for name in names.iter().copied().collect::<BTreeSet<_>>() {
            let item = self.item(name)?;
            let entry = match &item.tensor {
                // Whoever asks says what is wrong.
                Some((dtype, shape)) => {
                    let (dtype, shape) = (*dtype, shape.clone());
                    let kind = Kind::Tensor { dtype, shape, chunks: Vec::new() };
                    Entry { name: item.name.clone(), path: item.path.clone(), kind }
                }
                None => self.manifest.entry(name)?,
            };
            for chunk in entry.chunks() {
                if let btree_map::Entry::Vacant(vacant) = files.entry(chunk.file) {
                    vacant.insert(self.manifest.file(chunk.file)?);
                }
            }
            entries.push(entry);
        }
        ours::some_of(&self.manifest, &self.folder, entries, files)
    }

    pub(super) fn side_files(&self) -> Result<Vec<String>> {
        let files = self.manifest.files()?;
        let names = files.iter().filter_map(|file| side_name(&file.name)).map(str::to_owned);
        let mut names: Vec<String> = names.collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    pub(super) fn side_file(&self, name: &str) -> Result<Vec<u8>> {
        for rank in 0..self.manifest.info().world_size {
            let files = self.manifest.part_files(rank)?;
            let Some(file) = files.iter().find(|file| side_name(&file.name) == Some(name)) else {
                continue;
            };
            let data = DataFile { name: file.name.clone(), bytes: Some(file.bytes) };
            let files = BTreeMap::from([(0, data)]);
            let open =
                ours::some_of(&self.manifest, &self.folder, Vec::new(), files)?.open_file(0)?;
            let mut bytes = buffer(open.size())?;
            open.read_exact_at(&mut bytes, 0)?;
            return match file.crc {
                Some(crc) if crc != crc32(&bytes) => Err(wrong(open.path.display())),
                _ => Ok(bytes),
            };
        }
        Err(no_side_file(name, self.folder.path()))
    }
}

/// An entry with the chunks that were found; two regions may share some.
fn entry(item: Item, mut chunks: Vec<Chunk>) -> Option<Entry> {
    chunks.sort_by_key(|chunk| (chunk.file, chunk.offset));
    chunks.dedup();
    let (dtype, shape) = item.tensor?;
    Some(Entry { name: item.name, path: item.path, kind: Kind::Tensor { dtype, shape, chunks } })
}

/// The name of a side file, `<attempt>_<rank>_<name>`; `None` of a data file.
fn side_name(stored: &str) -> Option<&str> {
    let mut words = stored.splitn(3, '_');
    let (_, _, name) = (words.next()?, words.next()?, words.next()?);
    let data = name.strip_suffix(".distcp").is_some_and(|n| n.parse::<u32>().is_ok());
    (!data).then_some(name)
}

/// Checksums of blocks by the offsets and sides of their chunk.
type Sums<'c> = BTreeMap<(&'c [u64], &'c [u64]), &'c [u32]>;

/// Those of chunks, unless one has none.
fn sums(chunks: &[Vec<Chunk>]) -> Option<Sums<'_>> {
    let sums = chunks.iter().flatten().map(|chunk| {
        let crcs = chunk.data.as_ref().map(|place| place.crcs.as_slice())?;
        let sides = (chunk.region.offsets.as_slice(), chunk.region.sizes.as_slice());
        (!crcs.is_empty()).then_some((sides, crcs))
    });
    sums.collect()
}
