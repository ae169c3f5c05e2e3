//! Opening a model: from a path to a catalog and open files.

use crate::catalog::{Catalog, CatalogFile, Check, Format, ObjectEntry, Stored, TensorEntry};
use crate::folder::{self, Choice};
use crate::index::{Index, MAX_FILES};
use crate::open_file::OpenFile;
use crate::parallel;
use crate::place::Folder;
use crate::safetensors::{Header, read_header_gated};
use crate::text::{listed, quoted, shown};
use crate::torch_file::{self, TorchFile};
use forebay_error::{Code, Error, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// How many names an error lists before it counts.
const LISTED: usize = 200;

/// A model: what it holds, and its files, open, in the order of the catalog's.
#[derive(Clone, Debug)]
pub struct Model {
    /// What it holds.
    pub catalog: Catalog,
    /// Its files.
    pub files: Vec<Arc<OpenFile>>,
}

impl Model {
    /// Fails with `file_changed` if any file changed since it was opened.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(|file| file.check_unchanged())
    }
}

/// What the header of one file says.
enum Contents {
    Safetensors(Header),
    Torch(TorchFile),
}

impl Contents {
    fn format(&self) -> Format {
        match self {
            Contents::Safetensors(_) => Format::Safetensors,
            Contents::Torch(_) => Format::Torch,
        }
    }

    /// Reads what a file holds. Archives are known by their first bytes, and those that should be archives by name.
    fn read(name: &str, file: &OpenFile, gate: &Mutex<()>) -> Result<Self> {
        if folder::is_torch(name) || torch_file::is_archive(file)? {
            return torch_file::read(file).map(Contents::Torch);
        }
        read_header_gated(file, gate).map(Contents::Safetensors)
    }
}

/// Opens the model at a path: a safetensors file (whatever its name, unless the name is that of another format), a file
/// of `torch.save`, an index, or a folder (see [`crate::folder`]).
pub fn open_model(path: &Path) -> Result<Model> {
    let stat =
        std::fs::metadata(path).map_err(|error| Error::io("cannot open", error).at(shown(path)))?;
    if !stat.is_dir() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return match folder::is_index(&name) {
            true => open_index(&Folder::from(path.parent().unwrap_or(Path::new(""))), &name),
            false => open_files(&[path.to_owned()]),
        };
    }
    let snapshot = crate::cache_layout::snapshot_of(path)?;
    open_model_in(&Folder::from(snapshot.as_deref().unwrap_or(path)), None)
}

/// Opens the model in a folder, here or remote: what its names decide (see [`crate::folder`]), or the index or file of
/// one name.
pub fn open_model_in(folder: &Folder, name: Option<&str>) -> Result<Model> {
    let (choice, warnings) = match name {
        Some(name) if folder::is_index(name) => (Choice::Index(name.to_owned()), Vec::new()),
        Some(name) => return open_files_in(&[(folder.clone(), name.to_owned())]),
        None => folder::decide(folder)?,
    };
    let mut model = match choice {
        Choice::Index(name) => open_index(folder, &name)?,
        Choice::Files(names) => {
            let place = |name| (Place::In(folder.clone()), name);
            open_union(names.into_iter().map(place).collect())?
        }
    };
    model.catalog.warnings.splice(0..0, warnings);
    Ok(model)
}

/// Opens these files as one model. A tensor in two of them is `duplicate_tensor`.
pub fn open_files(paths: &[PathBuf]) -> Result<Model> {
    let named = paths.iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (Place::Path(path.clone()), name)
    });
    open_checked(named.collect())
}

/// The same of files in folders that may be remote.
pub fn open_files_in(files: &[(Folder, String)]) -> Result<Model> {
    let named = files.iter().map(|(folder, name)| (Place::In(folder.clone()), name.clone()));
    open_checked(named.collect())
}

/// Where a file is.
enum Place {
    /// Its own path, whose name need not be text.
    Path(PathBuf),
    /// In this folder.
    In(Folder),
}

impl Place {
    fn open(&self, name: &str) -> Result<OpenFile> {
        match self {
            Place::Path(path) => OpenFile::open(path),
            Place::In(folder) => folder.open(name),
        }
    }

    fn shown(&self, name: &str) -> String {
        match self {
            Place::Path(path) => shown(path),
            Place::In(folder) => shown(&folder.path().join(name)),
        }
    }
}

fn open_checked(named: Vec<(Place, String)>) -> Result<Model> {
    if named.is_empty() {
        return Err(Error::new(Code::Usage, "no files to open"));
    }
    if named.len() > MAX_FILES {
        return Err(Error::new(Code::Unsupported, format!("more than {MAX_FILES} files")));
    }
    for (place, name) in &named {
        if let Some(kind) = folder::foreign_kind(name).filter(|_| !folder::is_torch(name)) {
            let error = Error::new(
                Code::UnknownFormat,
                format!("is {kind}, safetensors and torch.save are what is read"),
            );
            return Err(error.at(place.shown(name)));
        }
    }
    open_union(named)
}

/// All tensors of all these files.
fn open_union(named: Vec<(Place, String)>) -> Result<Model> {
    let opened: Result<Vec<_>> =
        parallel::map(&named, |(place, name)| place.open(name)).into_iter().collect();
    let opened = opened?;
    let gate = Mutex::new(());
    let jobs: Vec<_> = named.iter().zip(&opened).collect();
    let read =
        |((_, name), file): &(&(Place, String), &OpenFile)| Contents::read(name, file, &gate);
    let contents = parallel::map(&jobs, read);
    let names = named.into_iter().map(|(_, name)| name);
    let mut parts = Parts::default();
    for ((name, file), contents) in names.zip(opened).zip(contents) {
        parts.add(name, file, contents?)?;
    }
    parts.finish(Vec::new())
}

/// The tensors that an index names, from the files it gives them to.
fn open_index(folder: &Folder, own: &str) -> Result<Model> {
    let file = folder.open(own)?;
    let index = Index::read(&file)?;
    let path = &file.path;
    for file in &index.files {
        folder::check_suffix(own, &file.name).map_err(|error| error.at(shown(path)))?;
    }
    let opened = open_listed(&index, path, folder)?;
    let named: HashSet<&str> =
        index.files.iter().flat_map(|file| &file.tensors).map(String::as_str).collect();
    let gate = Mutex::new(());
    let jobs: Vec<_> = opened.iter().zip(&index.files).collect();
    let headers = parallel::map(&jobs, |(file, listed)| {
        let contents = Contents::read(&listed.name, file, &gate)?;
        pick(contents, &listed.tensors, &named).map_err(|error| error.at(shown(&file.path)))
    });
    let mut parts = Parts::default();
    let mut unlisted = Vec::new();
    for ((listed, file), picked) in index.files.iter().zip(opened).zip(headers) {
        let (contents, left) = picked?;
        unlisted.extend(left);
        parts.add(listed.name.clone(), file, contents)?;
    }
    let mut warnings = Vec::new();
    if !unlisted.is_empty() {
        let names = listed(unlisted.iter().map(String::as_str), 5);
        warnings.push(format!("tensors that the index does not name are left out: {names}"));
    }
    let sum: u64 = parts.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes));
    if let Some(said) = index.total_size.filter(|&said| said != sum) {
        warnings.push(format!("total_size of the index is {said}, its tensors have {sum} bytes"));
    }
    parts.finish(warnings)
}

/// Opens the files of an index; those that are not there are named in one error.
fn open_listed(index: &Index, path: &Path, folder: &Folder) -> Result<Vec<OpenFile>> {
    let opened = parallel::map(&index.files, |file| folder.open(&file.name));
    let is_missing =
        |result: &Result<OpenFile>| matches!(result, Err(error) if error.code() == Code::NotFound);
    let missing = index.files.iter().zip(&opened).filter(|(_, result)| is_missing(result));
    let missing: Vec<&str> = missing.map(|(file, _)| file.name.as_str()).collect();
    if missing.is_empty() {
        return opened.into_iter().collect();
    }
    let what = format!(
        "{} of the {} files that the index names are not there: {}",
        missing.len(),
        index.files.len(),
        listed(missing.into_iter(), LISTED)
    );
    let error = Error::new(Code::MissingShard, what).at(shown(path));
    let dangling =
        opened.into_iter().filter_map(Result::err).find_map(|error| error.hints().first().cloned());
    let error = match dangling {
        Some(hint) => error.hint(hint),
        None => error,
    };
    Err(error.hint("download or copy the missing files"))
}

/// Keeps the tensors of a file that the index gives to it; the second value is names that it gives to none.
fn pick(
    mut contents: Contents,
    wanted: &[String],
    named: &HashSet<&str>,
) -> Result<(Contents, Vec<String>)> {
    let mut unlisted = Vec::new();
    let mut held = HashSet::new();
    let mut keep = |name: &str| {
        let keep = wanted.binary_search_by(|listed| listed.as_str().cmp(name)).is_ok();
        if keep {
            held.insert(name.to_owned());
        } else if !named.contains(name) {
            unlisted.push(name.to_owned());
        }
        keep
    };
    match &mut contents {
        Contents::Safetensors(header) => header.tensors.retain(|tensor| keep(&tensor.name)),
        Contents::Torch(file) => file.tensors.retain(|tensor| keep(&tensor.name)),
    }
    if held.len() == wanted.len() {
        return Ok((contents, unlisted));
    }
    let absent: Vec<&str> =
        wanted.iter().map(String::as_str).filter(|name| !held.contains(*name)).collect();
    let what = match absent.as_slice() {
        [name] => {
            format!("the index gives tensor {} to a file that does not hold it", quoted(name))
        }
        _ => {
            let names = listed(absent.iter().copied(), LISTED);
            format!(
                "the index gives {} tensors to a file that does not hold them: {names}",
                absent.len()
            )
        }
    };
    Err(Error::new(Code::TensorNotInShard, what)
        .hint("the index and the files are of different versions"))
}

/// A catalog in the making.
#[derive(Default)]
struct Parts {
    format: Option<Format>,
    metadata: Option<Vec<(String, String)>>,
    catalog: Vec<CatalogFile>,
    files: Vec<Arc<OpenFile>>,
    tensors: Vec<TensorEntry>,
    objects: Vec<ObjectEntry>,
    checks: Vec<Check>,
    warnings: Vec<String>,
}

impl Parts {
    fn add(&mut self, name: String, file: OpenFile, contents: Contents) -> Result<()> {
        let place = self.files.len();
        let format = contents.format();
        if *self.format.get_or_insert(format) != format {
            let what = "the files of one model are of two formats";
            return Err(Error::new(Code::Unsupported, what).at(shown(&file.path)));
        }
        let warnings = match contents {
            Contents::Safetensors(header) => self.add_header(place, header),
            Contents::Torch(torch) => self.add_torch(place, torch),
        };
        self.warnings
            .extend(warnings.into_iter().map(|warning| format!("{}: {warning}", quoted(&name))));
        self.catalog.push(CatalogFile { name, path: file.path.clone(), size: file.size() });
        self.files.push(Arc::new(file));
        Ok(())
    }

    fn add_header(&mut self, place: usize, header: Header) -> Vec<String> {
        if place == 0 {
            self.metadata = header.metadata;
        }
        self.tensors.extend(header.tensors.into_iter().map(|tensor| TensorEntry {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            file: place,
            offset: header.data_start + tensor.begin,
            bytes: tensor.end - tensor.begin,
            stored: Stored::Run,
        }));
        header.warnings
    }

    fn add_torch(&mut self, place: usize, torch: TorchFile) -> Vec<String> {
        self.tensors.extend(torch.tensors.into_iter().map(|mut tensor| {
            tensor.file = place;
            if let Stored::Pieces(pieces) = &mut tensor.stored {
                pieces.iter_mut().for_each(|piece| piece.file = place);
            }
            tensor
        }));
        self.checks.extend(torch.checks.into_iter().map(|check| Check { file: place, ..check }));
        self.objects.extend(torch.objects);
        torch.warnings
    }

    fn finish(mut self, warnings: Vec<String>) -> Result<Model> {
        self.warnings.extend(warnings);
        let mut catalog = Catalog::new(
            self.format.unwrap_or(Format::Safetensors),
            self.metadata,
            self.catalog,
            self.tensors,
            self.warnings,
        )?;
        catalog.objects = self.objects;
        catalog.checks = self.checks;
        Ok(Model { catalog, files: self.files })
    }
}
