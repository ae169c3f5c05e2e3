//! The rules for the architecture page: it names every crate and justifies every dependency.

use std::fs;
use std::path::Path;

const PAGE: &str = "docs/ARCHITECTURE.md";

/// All that the page lacks, as lines to print.
pub(super) fn check(root: &Path) -> Vec<String> {
    let page = fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap_or_default();
    let crates = folder_names(&root.join("crates"));
    let mut findings: Vec<String> = missing(&page, crates.iter().map(String::as_str))
        .map(|name| format!("{PAGE}:0: the crate `{name}` is not named"))
        .collect();
    let outside = dependencies(&manifest);
    findings.extend(
        missing(&page, outside.iter().copied())
            .map(|name| format!("{PAGE}:0: the dependency `{name}` is not justified")),
    );
    findings
}

/// The names that the page does not have in backticks.
fn missing<'a>(page: &str, names: impl Iterator<Item = &'a str>) -> impl Iterator<Item = &'a str> {
    names.filter(move |name| !page.contains(&format!("`{name}`")))
}

fn folder_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().join("Cargo.toml").is_file());
    let mut names: Vec<String> =
        folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The keys of `[workspace.dependencies]` that are not crates of ours.
fn dependencies(manifest: &str) -> Vec<&str> {
    let table = manifest.lines().skip_while(|line| line.trim() != "[workspace.dependencies]");
    let table = table.skip(1).take_while(|line| !line.starts_with('['));
    let entries = table.filter_map(|line| line.split_once('='));
    let outside = entries.filter(|(_, value)| !value.contains("path = "));
    outside.map(|(name, _)| name.trim()).filter(|name| !name.starts_with('#')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_others_are_listed() {
        let manifest = "[workspace]\nresolver = \"3\"\n[workspace.dependencies]\n\
                        own = { path = \"crates/own\" }\n\nlibc = \"0.2\"\n# clap = \"4\"\n\
                        serde = { version = \"1\" }\n[profile.dev]\ndebug = 0\n";
        assert_eq!(dependencies(manifest), ["libc", "serde"]);
        assert!(dependencies("").is_empty());
    }

    #[test]
    fn names_count_in_backticks_only() {
        let page = "| `libc` | serde |";
        let found: Vec<_> = missing(page, ["libc", "serde", "lib"].into_iter()).collect();
        assert_eq!(found, ["serde", "lib"]);
    }

    #[test]
    fn a_crate_that_the_page_does_not_name() {
        let root = std::env::temp_dir().join(format!("forebay-tidy-{}", std::process::id()));
        fs::create_dir_all(root.join("crates/forebay-new")).unwrap();
        fs::create_dir_all(root.join("crates/not-a-crate")).unwrap();
        fs::write(root.join("crates/forebay-new/Cargo.toml"), "").unwrap();
        let findings = check(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].contains("`forebay-new`"));
    }
}
