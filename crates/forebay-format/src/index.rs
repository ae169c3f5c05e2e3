//! The index of a model in several files, as Hugging Face writes it:
//! `{"metadata": {"total_size": N}, "weight_map": {TENSOR: FILE}}`.
//!
//! The index is the list of the files and of the tensors. Its file names are refused by their spelling, before
//! anything is opened, when they could lead out of the folder of the index; links that the folder's owner made are the
//! owner's affair and are followed.

use crate::open_file::OpenFile;
use crate::text::{quoted, shown};
use forebay_error::{Code, Error, Result};
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Component, Path};

/// The longest index that is read. The largest seen has a few hundred thousand tensors in some 30 MB.
pub const MAX_INDEX_BYTES: u64 = 512 << 20;

/// The most files a model may have. All of them are open at once while it loads.
pub const MAX_FILES: usize = 65_536;

/// What an index says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// The bytes it says the tensors have; advice, and often wrong.
    pub total_size: Option<u64>,
    /// The files, sorted by name, each relative to the folder of the index.
    pub files: Vec<IndexFile>,
}

/// One file of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexFile {
    /// Its name, plain components joined by `/`.
    pub name: String,
    /// The tensors the index gives to it, sorted.
    pub tensors: Vec<String>,
}

impl Index {
    /// Reads an index, up to [`MAX_INDEX_BYTES`].
    pub fn read(file: &OpenFile) -> Result<Self> {
        let size = file.size();
        if size > MAX_INDEX_BYTES {
            let what = format!("index has {size} bytes, {MAX_INDEX_BYTES} is the most allowed");
            return Err(Error::new(Code::InvalidIndex, what).at(shown(&file.path)));
        }
        let mut json = Vec::new();
        let room = usize::try_from(size).ok().filter(|&len| json.try_reserve_exact(len).is_ok());
        let Some(len) = room else {
            return Err(Error::new(Code::OutOfMemory, "no memory for the index"));
        };
        json.resize(len, 0);
        file.read_exact_at(&mut json, 0)?;
        Self::parse(&json).map_err(|error| error.at(shown(&file.path)))
    }

    /// Parses an index and checks the spelling of its file names.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let code = Cell::new(Code::InvalidIndex);
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let parsed = deserializer.deserialize_map(IndexVisitor(&code));
        let parsed = parsed.and_then(|parsed| deserializer.end().map(|()| parsed));
        let parsed =
            parsed.map_err(|error| Error::new(code.get(), format!("invalid index: {error}")))?;
        let Some(map) = parsed.map else {
            return Err(Error::new(Code::InvalidIndex, "index has no weight_map"));
        };
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (place, tensors) in map.tensors.into_iter().enumerate() {
            let spelling = map.files.get(place).map(String::as_str).unwrap_or_default();
            files.entry(plain_path(spelling)?).or_default().extend(tensors);
        }
        let files = files.into_iter().map(|(name, mut tensors)| {
            tensors.sort_unstable();
            IndexFile { name, tensors }
        });
        Ok(Self { total_size: parsed.total_size, files: files.collect() })
    }

    /// Whether the index names this file.
    pub fn names(&self, file: &str) -> bool {
        self.files.binary_search_by(|entry| entry.name.as_str().cmp(file)).is_ok()
    }
}

/// A relative path that stays below its folder, without `.` and doubled slashes; anything else is `unsafe_path`.
pub(crate) fn plain_path(spelling: &str) -> Result<String> {
    let unsafe_path = |why: &str| {
        let what = format!("index names the file {}, which {why}", quoted(spelling));
        Err(Error::new(Code::UnsafePath, what)
            .hint("files of a model must lie in or below its folder"))
    };
    if spelling.contains('\0') {
        return unsafe_path("holds a NUL");
    }
    let mut plain = String::with_capacity(spelling.len());
    for component in Path::new(spelling).components() {
        match component {
            Component::Normal(name) => {
                if !plain.is_empty() {
                    plain.push('/');
                }
                plain.push_str(&name.to_string_lossy());
            }
            Component::CurDir => {}
            Component::ParentDir => return unsafe_path("holds .."),
            Component::RootDir | Component::Prefix(_) => return unsafe_path("is absolute"),
        }
    }
    if plain.is_empty() { unsafe_path("is empty") } else { Ok(plain) }
}

struct Parsed {
    total_size: Option<u64>,
    map: Option<WeightMap>,
}

/// File spellings, each once, and the tensors of each.
#[derive(Default)]
struct WeightMap {
    files: Vec<String>,
    tensors: Vec<Vec<String>>,
}

struct IndexVisitor<'c>(&'c Cell<Code>);

impl<'de> Visitor<'de> for IndexVisitor<'_> {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut parsed = Parsed { total_size: None, map: None };
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "weight_map" if parsed.map.is_some() => {
                    self.0.set(Code::DuplicateKey);
                    return Err(de::Error::custom("weight_map occurs twice"));
                }
                "weight_map" => parsed.map = Some(map.next_value_seed(MapSeed(self.0))?),
                "metadata" => parsed.total_size = map.next_value_seed(TotalSeed::Metadata)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(parsed)
    }
}

/// `metadata.total_size`, or nothing where either is something else. Some writers put a float there.
#[derive(Clone, Copy)]
enum TotalSeed {
    Metadata,
    Size,
}

impl<'de> DeserializeSeed<'de> for TotalSeed {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<u64>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TotalSeed {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_u64<E>(self, size: u64) -> Result<Option<u64>, E> {
        Ok(matches!(self, Self::Size).then_some(size))
    }

    fn visit_f64<E>(self, size: f64) -> Result<Option<u64>, E> {
        let fits = size >= 0.0 && size < u64::MAX as f64;
        Ok((matches!(self, Self::Size) && fits).then_some(size as u64))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Option<u64>, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<u64>, A::Error> {
        let mut size = None;
        while let Some(key) = map.next_key::<String>()? {
            match self {
                Self::Metadata if key == "total_size" => size = map.next_value_seed(Self::Size)?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(size)
    }
}

struct MapSeed<'c>(&'c Cell<Code>);

impl<'de> DeserializeSeed<'de> for MapSeed<'_> {
    type Value = WeightMap;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<WeightMap, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MapSeed<'_> {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut out = WeightMap::default();
        let mut places: HashMap<String, usize> = HashMap::new();
        let mut owners: HashMap<String, usize> = HashMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            let place = *places.entry(file).or_insert_with_key(|file| {
                out.files.push(file.clone());
                out.files.len() - 1
            });
            if out.files.len() > MAX_FILES {
                return Err(de::Error::custom(format!("more than {MAX_FILES} files")));
            }
            match owners.get(&tensor) {
                Some(&earlier) if earlier != place => {
                    self.0.set(Code::DuplicateKey);
                    let file = |place: usize| {
                        out.files.get(place).map(|file| quoted(file)).unwrap_or_default()
                    };
                    let (a, b) = (file(earlier), file(place));
                    let what =
                        format!("weight_map gives tensor {} to {a} and to {b}", quoted(&tensor));
                    return Err(de::Error::custom(what));
                }
                Some(_) => {}
                None => drop(owners.insert(tensor, place)),
            }
        }
        out.tensors.resize_with(out.files.len(), Vec::new);
        for (tensor, place) in owners {
            if let Some(tensors) = out.tensors.get_mut(place) {
                tensors.push(tensor);
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(json: &str) -> Option<Code> {
        Index::parse(json.as_bytes()).err().map(|error| error.code())
    }

    #[test]
    fn spellings() {
        for good in ["a", "a/b", "./a", "a//b", "a/./b", "..a", "a..", "a b", "\\x"] {
            assert!(plain_path(good).is_ok(), "{good}");
        }
        assert_eq!(plain_path("./a//b/").unwrap(), "a/b");
        for bad in ["", ".", "/a", "//a", "..", "../a", "a/../b", "a/..", "a\0b", "./.."] {
            assert_eq!(plain_path(bad).unwrap_err().code(), Code::UnsafePath, "{bad:?}");
        }
    }

    #[test]
    fn maps() {
        let index =
            Index::parse(br#"{"weight_map":{"b":"y","a":"./x","c":"x"},"other":[1]}"#).unwrap();
        let names: Vec<_> =
            index.files.iter().map(|file| (file.name.as_str(), file.tensors.len())).collect();
        assert_eq!(names, [("x", 2), ("y", 1)]);
        assert_eq!(index.total_size, None);
        assert!(index.names("y") && !index.names("z"));
        for bad in [
            "",
            "[]",
            "{",
            "{}",
            r#"{"weight_map":null}"#,
            r#"{"weight_map":{"a":1}}"#,
            r#"{"weight_map":{}} x"#,
        ] {
            assert_eq!(code(bad), Some(Code::InvalidIndex), "{bad}");
        }
        assert_eq!(code(r#"{"weight_map":{"a":"x","a":"x"}}"#), None);
        assert_eq!(code(r#"{"weight_map":{"a":"x","a":"y"}}"#), Some(Code::DuplicateKey));
        assert_eq!(code(r#"{"weight_map":{},"weight_map":{}}"#), Some(Code::DuplicateKey));
        assert_eq!(code(&"[".repeat(100_000)), Some(Code::InvalidIndex));
        assert_eq!(code(&format!(r#"{{"x":{}"#, "[".repeat(1_000_000))), Some(Code::InvalidIndex));
    }

    #[test]
    fn total_sizes() {
        let total = |metadata: &str| {
            let json = format!(r#"{{"metadata":{metadata},"weight_map":{{}}}}"#);
            Index::parse(json.as_bytes()).unwrap().total_size
        };
        assert_eq!(total(r#"{"total_size":7}"#), Some(7));
        assert_eq!(total(r#"{"total_size":7.0}"#), Some(7));
        assert_eq!(total(r#"{"total_size":-7}"#), None);
        assert_eq!(total(r#"{"total_size":1e300}"#), None);
        assert_eq!(total(r#"{"total_size":"7"}"#), None);
        assert_eq!(total(r#"{"total_size":{"total_size":7},"x":[]}"#), None);
        assert_eq!(total("null"), None);
        assert_eq!(total("[7]"), None);
        assert_eq!(total("7"), None);
    }
}
