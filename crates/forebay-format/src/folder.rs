//! Which files of a folder are the model.
//!
//! In this order, the first that is there:
//!
//! 1. `model.safetensors.index.json`: the index decides files and tensors;
//! 2. `model.safetensors` alone;
//! 3. `diffusion_pytorch_model.safetensors.index.json`, then `diffusion_pytorch_model.safetensors`;
//! 4. the one other index, `*.safetensors.index*.json`; several are an error;
//! 5. all `*.safetensors` directly in the folder. A set `*-00001-of-00003.safetensors` must be whole. Files
//!    `consolidated*.safetensors` hold the same model under other names: beside other files they count only if
//!    `params.json` is there and `config.json` is not, the others only the other way round, and else it is an error;
//! 6. where there are no safetensors files: `pytorch_model.bin.index.json`, then `pytorch_model.bin`. No other files of
//!    torch.save: a folder may hold optimizers and training arguments beside the weights.
//!
//! Hidden files (`._model.safetensors` of macOS, temporary files of savers) are never considered, nor is what lies in
//! folders below.

use crate::place::Folder;
use crate::text::{listed, shown};
use forebay_error::{Code, Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// What to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This index.
    Index(String),
    /// These files, sorted.
    Files(Vec<String>),
}

/// Names of the folder that say something, sorted.
#[derive(Debug, Default)]
struct Listing {
    tensors: BTreeSet<String>,
    indexes: BTreeSet<String>,
    /// Files of formats that are not read, or not without being named.
    foreign: BTreeSet<String>,
    has_torch_index: bool,
    has_config: bool,
    has_params: bool,
}

/// The most names that a folder may hold.
const MAX_NAMES: usize = 4 << 20;

const SUFFIX: &str = ".safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SINGLE: &str = "model.safetensors";
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";
const TORCH_SINGLE: &str = "pytorch_model.bin";
const USUAL: [(&str, &str); 2] = [
    (INDEX, SINGLE),
    ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
];

/// Decides which files of a folder are the model. The second value is what is worth a warning.
pub fn decide(folder: &Folder) -> Result<(Choice, Vec<String>)> {
    let listing = list(folder)?;
    choose(&listing).map_err(|error| error.at(shown(folder.path())))
}

/// Whether a name is that of an index.
pub(crate) fn is_index(name: &str) -> bool {
    name.ends_with(".json")
        && (name.contains(".safetensors.index.") || name.ends_with(".index.json"))
}

/// Whether a name is one that files of torch.save have.
pub(crate) fn is_torch(name: &str) -> bool {
    let suffix = name.rsplit_once('.').map(|(_, suffix)| suffix);
    matches!(suffix, Some("bin" | "pt" | "pth" | "ckpt"))
}

/// What a name says about a format that is not read, if it does.
pub(crate) fn foreign_kind(name: &str) -> Option<&'static str> {
    let (_, suffix) = name.rsplit_once('.')?;
    match suffix {
        _ if is_torch(name) => Some("a PyTorch pickle"),
        "pkl" | "pickle" => Some("a bare pickle"),
        "distcp" | "metadata" => Some("part of a PyTorch distributed checkpoint"),
        "gguf" | "ggml" => Some("GGUF"),
        "onnx" => Some("ONNX"),
        "h5" | "hdf5" | "keras" => Some("HDF5"),
        "msgpack" => Some("Flax"),
        "npz" | "npy" => Some("NumPy"),
        "json" => Some("JSON that is no index"),
        _ => None,
    }
}

/// Fails unless a file that the index of this name lists is of the index's kind by its name.
pub(crate) fn check_suffix(index: &str, name: &str) -> Result<()> {
    let torch = !index.contains(SUFFIX) && is_torch(name);
    if name.ends_with(SUFFIX) || torch {
        return Ok(());
    }
    let kind = foreign_kind(name).unwrap_or("of no known kind");
    let what = format!("file {} is {kind}, safetensors is what is read", crate::text::quoted(name));
    Err(Error::new(Code::UnknownFormat, what))
}

fn list(folder: &Folder) -> Result<Listing> {
    let mut listing = Listing::default();
    for name in folder.names(MAX_NAMES)? {
        match name.as_str() {
            ".metadata" => drop(listing.foreign.insert(name)),
            _ if name.starts_with('.') => {}
            "config.json" => listing.has_config = true,
            "params.json" => listing.has_params = true,
            TORCH_INDEX => listing.has_torch_index = true,
            _ if name.ends_with(SUFFIX) => drop(listing.tensors.insert(name)),
            _ if is_index(&name) && name.contains(SUFFIX) => drop(listing.indexes.insert(name)),
            _ if name.ends_with(".json") => {}
            _ if foreign_kind(&name).is_some() => drop(listing.foreign.insert(name)),
            _ => {}
        }
        if listing.tensors.len() > crate::index::MAX_FILES {
            let what = format!("more than {} files *.safetensors", crate::index::MAX_FILES);
            return Err(Error::new(Code::Unsupported, what).at(shown(folder.path())));
        }
    }
    Ok(listing)
}

fn choose(listing: &Listing) -> Result<(Choice, Vec<String>)> {
    for (index, single) in USUAL {
        if listing.indexes.contains(index) {
            return Ok((Choice::Index(index.to_owned()), Vec::new()));
        }
        if listing.tensors.contains(single) {
            return Ok((Choice::Files(vec![single.to_owned()]), Vec::new()));
        }
    }
    let mut indexes = listing.indexes.iter();
    match (indexes.next(), indexes.next()) {
        (Some(index), None) => return Ok((Choice::Index(index.clone()), Vec::new())),
        (Some(_), Some(_)) => {
            let names = listed(listing.indexes.iter().map(String::as_str), 20);
            let what = format!("folder has several indexes and none has the usual name: {names}");
            return Err(Error::new(Code::InvalidIndex, what).hint("name the index that you mean"));
        }
        (None, _) => {}
    }
    if listing.tensors.is_empty() {
        return torch_choice(listing).map(|choice| (choice, Vec::new()));
    }
    let (files, warnings) = one_layout(listing)?;
    check_whole(&files)?;
    Ok((Choice::Files(files), warnings))
}

fn torch_choice(listing: &Listing) -> Result<Choice> {
    match listing.has_torch_index {
        true => Ok(Choice::Index(TORCH_INDEX.to_owned())),
        false if listing.foreign.contains(TORCH_SINGLE) => {
            Ok(Choice::Files(vec![TORCH_SINGLE.to_owned()]))
        }
        false => Err(nothing(listing)),
    }
}

fn nothing(listing: &Listing) -> Error {
    let mut found: BTreeMap<&str, &str> = BTreeMap::new();
    for name in &listing.foreign {
        found.entry(foreign_kind(name).unwrap_or_default()).or_insert(name);
    }
    if found.is_empty() {
        return Error::new(Code::UnknownFormat, "folder holds no safetensors files")
            .hint("name the folder that holds them; folders below are not searched");
    }
    let found: Vec<_> = found
        .iter()
        .map(|(kind, name)| format!("{} ({kind})", crate::text::quoted(name)))
        .collect();
    let what = format!("folder holds no safetensors files, it holds {}", found.join(", "));
    let error = Error::new(Code::UnknownFormat, what);
    match listing.foreign.iter().any(|name| is_torch(name)) {
        true => error.hint("name the file of torch.save that you mean"),
        false => error.hint("convert the model to safetensors; pickles are never executed here"),
    }
}

/// Drops the second copy of a model that comes in two layouts.
fn one_layout(listing: &Listing) -> Result<(Vec<String>, Vec<String>)> {
    let is_consolidated = |name: &&String| name.starts_with("consolidated");
    let (consolidated, others): (Vec<&String>, Vec<&String>) =
        listing.tensors.iter().partition(is_consolidated);
    let owned = |names: &[&String]| names.iter().map(|&name| name.clone()).collect();
    if consolidated.is_empty() || others.is_empty() {
        return Ok((listing.tensors.iter().cloned().collect(), Vec::new()));
    }
    let (used, left) = match (listing.has_config, listing.has_params) {
        (true, false) => (others, consolidated),
        (false, true) => (consolidated, others),
        _ => {
            let names = listed(listing.tensors.iter().map(String::as_str), 20);
            let what = format!(
                "folder holds a model in two layouts and no index says which counts: {names}"
            );
            return Err(
                Error::new(Code::DuplicateTensor, what).hint("name the files of one layout")
            );
        }
    };
    let names = listed(left.iter().map(|name| name.as_str()), 5);
    Ok((owned(&used), vec![format!("a second layout of the model is left out: {names}")]))
}

/// Every set `PREFIX-I-of-N.safetensors` must have all of its N files: without an index nothing else would tell.
fn check_whole(files: &[String]) -> Result<()> {
    let mut sets: BTreeMap<(&str, &str), BTreeSet<u32>> = BTreeMap::new();
    for name in files {
        if let Some((prefix, index, total)) = numbered(name) {
            sets.entry((prefix, total)).or_default().insert(index);
        }
    }
    for ((prefix, total), present) in sets {
        let count: u32 = total.parse().unwrap_or(0);
        let first = u32::from(!present.contains(&0));
        let absent = |index: &u32| !present.contains(index);
        let missing: Vec<u32> =
            (first..count.saturating_add(first)).filter(absent).take(200).collect();
        if missing.is_empty() {
            continue;
        }
        let width = total.len();
        let names: Vec<_> = missing
            .iter()
            .map(|index| format!("{prefix}-{index:0width$}-of-{total}{SUFFIX}"))
            .collect();
        let what = format!(
            "{} of the {count} files of the set are there, missing: {}",
            present.len(),
            listed(names.iter().map(String::as_str), 200)
        );
        return Err(Error::new(Code::MissingShard, what).hint("download or copy the missing files"));
    }
    Ok(())
}

/// `PREFIX-I-of-N.safetensors` in its parts.
fn numbered(name: &str) -> Option<(&str, u32, &str)> {
    let (rest, total) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    let number = |text: &str| {
        let digits =
            (1..=6).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u32>().ok()).flatten()
    };
    number(total)?;
    Some((prefix, number(index)?, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide_among(names: &[&str]) -> Result<(Choice, Vec<String>)> {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        decide(&folder.path().into())
    }

    fn files(names: &[&str]) -> Vec<String> {
        match decide_among(names).unwrap().0 {
            Choice::Files(files) => files,
            Choice::Index(index) => panic!("{index}"),
        }
    }

    fn index(names: &[&str]) -> String {
        match decide_among(names).unwrap().0 {
            Choice::Index(index) => index,
            Choice::Files(files) => panic!("{files:?}"),
        }
    }

    fn code(names: &[&str]) -> Code {
        decide_among(names).unwrap_err().code()
    }

    #[test]
    fn usual_names_come_first() {
        assert_eq!(index(&[INDEX, SINGLE, "x.safetensors"]), INDEX);
        assert_eq!(files(&[SINGLE, "x.safetensors", "y.safetensors.index.json"]), [SINGLE]);
        let diffusion = "diffusion_pytorch_model.safetensors";
        assert_eq!(files(&[diffusion, "diffusion_pytorch_model.fp16.safetensors"]), [diffusion]);
        assert_eq!(
            index(&["y.safetensors.index.json", "x.safetensors"]),
            "y.safetensors.index.json"
        );
        assert_eq!(index(&["m.safetensors.index.fp16.json"]), "m.safetensors.index.fp16.json");
        let two =
            decide_among(&["y.safetensors.index.json", "z.safetensors.index.json"]).unwrap_err();
        assert_eq!(two.code(), Code::InvalidIndex);
        assert!(two.what().contains("y.safetensors") && two.what().contains("z.safetensors"));
    }

    #[test]
    fn without_an_index_all_files_count() {
        assert_eq!(
            files(&["b.safetensors", "a.safetensors", "._a.safetensors", "x.txt"]),
            ["a.safetensors", "b.safetensors"]
        );
        // An index of pickles says nothing about safetensors files.
        assert_eq!(files(&["a.safetensors", "pytorch_model.bin.index.json"]), ["a.safetensors"]);
    }

    #[test]
    fn weights_of_torch_count_where_there_are_no_others() {
        assert_eq!(files(&[TORCH_SINGLE, "optimizer.pt"]), [TORCH_SINGLE]);
        assert_eq!(index(&[TORCH_SINGLE, TORCH_INDEX]), TORCH_INDEX);
        assert_eq!(files(&[TORCH_SINGLE, TORCH_INDEX, SINGLE]), [SINGLE]);
        assert_eq!(code(&["optimizer.pt"]), Code::UnknownFormat);
        assert!(check_suffix(TORCH_INDEX, "pytorch_model-00001-of-00002.bin").is_ok());
        assert!(check_suffix(INDEX, "pytorch_model-00001-of-00002.bin").is_err());
    }

    #[test]
    fn one_of_two_layouts() {
        let (hf, mistral) = ("model-00001-of-00001.safetensors", "consolidated.safetensors");
        assert_eq!(files(&[mistral]), [mistral]);
        assert_eq!(files(&[hf, mistral, "config.json"]), [hf]);
        assert_eq!(files(&[hf, mistral, "params.json"]), [mistral]);
        assert_eq!(code(&[hf, mistral]), Code::DuplicateTensor);
        assert_eq!(code(&[hf, mistral, "params.json", "config.json"]), Code::DuplicateTensor);
        assert_eq!(decide_among(&[hf, mistral, "config.json"]).unwrap().1.len(), 1);
    }

    #[test]
    fn numbered_sets_must_be_whole() {
        let name = |index, total| format!("model-{index:05}-of-{total:05}.safetensors");
        let (one, three) = (name(1, 3), name(3, 3));
        let error = decide_among(&[&one, &three]).unwrap_err();
        assert_eq!(error.code(), Code::MissingShard);
        assert!(error.what().contains(&name(2, 3)), "{error}");
        assert_eq!(files(&[&one, &three, &name(2, 3)]).len(), 3);
        assert_eq!(files(&["x-0-of-2.safetensors", "x-1-of-2.safetensors"]).len(), 2);
        assert_eq!(code(&["x-00001-of-999999.safetensors"]), Code::MissingShard);
        assert_eq!(files(&["x-1-of-9999999.safetensors", "a-of-3.safetensors"]).len(), 2);
    }

    #[test]
    fn other_formats_are_named() {
        let error = decide_among(&["optimizer.bin", "x.gguf", "config.json"]).unwrap_err();
        assert_eq!(error.code(), Code::UnknownFormat);
        assert!(error.what().contains("optimizer.bin") && error.what().contains("GGUF"), "{error}");
        assert_eq!(code(&[]), Code::UnknownFormat);
        let dcp = decide_among(&[".metadata", "__0_0.distcp"]).unwrap_err();
        assert!(dcp.what().contains("distributed checkpoint"), "{dcp}");
        assert_eq!(
            decide(&std::path::Path::new("/nonexistent/x").into()).unwrap_err().code(),
            Code::NotFound
        );
    }
}
