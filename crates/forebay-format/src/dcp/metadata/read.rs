//! From the graph of a pickle to the tables: the root, and what the parts share.

use super::check::{Checks, check_cover_of_all};
use super::names::{Field, Names};
use super::table::DcpMetadata;
use crate::pickle::{self, Graph, Value};
use crate::text::quoted;
use crate::torch_zip::plain;
use forebay_error::{Code, Error, Result};
use std::collections::HashMap;

/// The most warnings that are kept.
const MAX_WARNINGS: usize = 20;

impl DcpMetadata {
    /// Reads the bytes of a `.metadata` and checks all there is to check without the data files.
    ///
    /// Errors name the entry, not the file, which the caller knows: `invalid_metadata`, `forbidden_global`,
    /// `unsafe_path`, `out_of_bounds` (a chunk leaves its tensor), `overlap`, `hole` (a chunk is missing or stored
    /// nowhere), `overflow` (a tensor of more than 2^64 bits), `unsupported` (chunks more irregular than
    /// [`forebay_tensor::check_cover`] can decide).
    pub fn read(bytes: &[u8]) -> Result<Self> {
        Self::read_with(bytes, Checks::default())
    }

    /// The same with some checks left out.
    pub fn read_with(bytes: &[u8], checks: Checks) -> Result<Self> {
        if bytes.is_empty() {
            return Err(bad(".metadata is empty").hint(
                "the save was cut off, or never reached the disk; use an earlier checkpoint",
            ));
        }
        let graph = pickle::parse(bytes, &pickle::Options::METADATA)?;
        let metadata = read_graph(&graph, bytes.len())?;
        drop(graph);
        if checks.coverage {
            check_cover_of_all(&metadata)?;
        }
        Ok(metadata)
    }
}

fn read_graph(graph: &Graph<'_>, input_bytes: usize) -> Result<DcpMetadata> {
    let mut reader = Reader::new(graph, input_bytes);
    let root = graph.root();
    let wanted = [Field::StateDictMetadata, Field::StorageData, Field::PlannerData];
    let (state, storage, planner) = match reader.names.fields(root, wanted) {
        Some([Some(state), Some(storage), planner]) => (state, storage, planner),
        _ => return Err(not_metadata(graph)),
    };
    reader.entries(state)?;
    reader.storage(storage)?;
    if let Some(planner) = planner {
        reader.paths(planner);
    }
    reader.describe(root);
    let tail = input_bytes.saturating_sub(graph.end());
    if tail > 0 {
        reader.warn(format!("{tail} bytes follow the end of .metadata's pickle"));
    }
    reader.finish_warnings();
    Ok(reader.out)
}

/// An error of the code that most here have.
pub(super) fn bad(what: impl Into<String>) -> Error {
    Error::new(Code::InvalidMetadata, what)
}

/// The same error, with the entry in front.
pub(super) fn within(kind: &str, name: &str, error: Error) -> Error {
    let what = format!("{kind} {}: {}", quoted(name), error.what());
    error.hints().iter().fold(Error::new(error.code(), what), |error, hint| error.hint(hint))
}

fn not_metadata(graph: &Graph<'_>) -> Error {
    let found = plain(graph, graph.root()).python_type;
    let found = quoted(&found);
    bad(format!("the pickle holds an object of type {found}, not the Metadata of a checkpoint"))
        .hint("only checkpoints of torch.distributed.checkpoint have a .metadata that can be read")
}

/// What reading builds up.
pub(super) struct Reader<'g, 'a> {
    pub(super) names: Names<'g, 'a>,
    /// Length of the file: what tables may grow to.
    pub(super) input_bytes: usize,
    pub(super) out: DcpMetadata,
    /// Rows by name.
    pub(super) rows: HashMap<&'g str, u32>,
    /// Element types by the node that names them.
    pub(super) elements: HashMap<Value, u32>,
    /// The node of `torch.Size`, once it was seen.
    pub(super) size_class: Option<Value>,
    unkept_warnings: usize,
    /// Bytes of the names of stale items.
    pub(super) stale_bytes: usize,
}

impl<'g, 'a> Reader<'g, 'a> {
    fn new(graph: &'g Graph<'a>, input_bytes: usize) -> Self {
        Self {
            names: Names::new(graph),
            input_bytes,
            out: DcpMetadata::empty(),
            rows: HashMap::new(),
            elements: HashMap::new(),
            size_class: None,
            unkept_warnings: 0,
            stale_bytes: 0,
        }
    }

    pub(super) fn graph(&self) -> &'g Graph<'a> {
        self.names.graph
    }

    pub(super) fn warn(&mut self, text: String) {
        match self.out.warnings.len() < MAX_WARNINGS {
            true => self.out.warnings.push(text),
            false => self.unkept_warnings += 1,
        }
    }

    fn finish_warnings(&mut self) {
        if self.unkept_warnings > 0 {
            self.out.warnings.push(format!("and {} more", self.unkept_warnings));
        }
    }
}
