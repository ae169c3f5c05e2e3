//! `cargo xtask tidy`: the house rules that a machine can check (CONTRIBUTING.md gives their
//! reasons).
//!
//! Each rule is a small function from the text of one file to what it finds there; this module
//! walks the tree. The rules read text, not syntax trees: [`source`] takes comments and literals
//! out first, which is all the grammar that they need.

mod docs;
mod rules;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};
use crate::workspace;

/// Folders with code of ours.
const FOLDERS: [&str; 4] = ["crates", "xtask", "python", "bench"];

/// One breach of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Counted from 1; 0 for a whole file.
    pub(crate) line: usize,
    pub(crate) what: String,
}

impl Finding {
    pub(crate) fn new(line: usize, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

pub(crate) fn run() -> Result {
    let root = workspace();
    let (files, findings) = check_tree(&root);
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} findings in {files} files", findings.len());
    if findings.is_empty() {
        return Ok(());
    }
    Err(Failure::new("the tree is not tidy").hint("CONTRIBUTING.md gives the rules"))
}

/// Checks all; gives the number of Rust files and the findings as `path:line: what`.
fn check_tree(root: &Path) -> (usize, Vec<String>) {
    let mut files = Vec::new();
    for folder in FOLDERS {
        rust_files(&root.join(folder), &mut files);
    }
    files.sort();
    let mut findings = Vec::new();
    for file in &files {
        let shown = file.strip_prefix(root).unwrap_or(file).display();
        match fs::read_to_string(file) {
            Ok(text) => {
                let of_file = rules::check(&text);
                findings.extend(of_file.iter().map(|f| format!("{shown}:{}: {}", f.line, f.what)));
            }
            Err(error) => findings.push(format!("{shown}:0: cannot be read: {error}")),
        }
    }
    findings.extend(docs::check(root));
    (files.len(), findings)
}

/// Rust files below a folder; not in `target` and not in hidden folders. Links are not followed.
fn rust_files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let hidden = name.to_string_lossy().starts_with('.');
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && !hidden && name != "target" => rust_files(&path, into),
            Ok(kind) if kind.is_file() && path.extension().is_some_and(|ext| ext == "rs") => {
                into.push(path);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let (files, findings) = check_tree(&workspace());
        assert!(files > 20, "only {files} files were found");
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    }
}
