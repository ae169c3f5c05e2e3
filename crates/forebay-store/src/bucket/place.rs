//! From a URL to a provider, a bucket and a prefix. Nothing is opened here.

use std::path::PathBuf;

use forebay_error::{Code, Error, Result};
use url::Url;

use crate::key::check_key;

/// Where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Folder(PathBuf),
    Bucket {
        provider: Provider,
        bucket: String,
        prefix: String,
    },
    /// Of this process; the one without a name is new each time.
    Memory {
        name: String,
        prefix: String,
    },
    /// Data in a folder of this node, everything else in another place: see [`crate::SplitStore`].
    Split {
        /// The place of all, a path or a URL.
        whole: String,
        /// The node's own folder.
        folder: PathBuf,
        /// Whether the place of all is whole, and the folder only nearer.
        near: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    S3,
    Gcs,
    Azure,
}

impl Provider {
    pub(super) fn scheme(self) -> &'static str {
        match self {
            Provider::S3 => "s3",
            Provider::Gcs => "gs",
            Provider::Azure => "az",
        }
    }
}

impl Place {
    /// Plain paths, `file:` URLs, `s3://BUCKET/PREFIX` (`s3a:` too), `gs://`, `az://CONTAINER/PREFIX`,
    /// `memory:NAME/PREFIX`; `node://PLACE/FOLDER` and `near://PLACE/FOLDER`.
    ///
    /// Errors: `usage` for other schemes, for URLs with secrets, queries or without a bucket; `unsafe_path` for a
    /// prefix that is none.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let scheme = text.split_once(':').map(|(scheme, _)| scheme).filter(|scheme| {
            let mut chars = scheme.chars();
            chars.next().is_some_and(|first| first.is_ascii_alphabetic())
                && chars.all(|char| char.is_ascii_alphanumeric() || "+-.".contains(char))
                // A name such as `run:7` in a folder is a path; `C:` is not a case here.
                && (text.contains("://") || matches!(*scheme, "file" | "memory"))
        });
        let Some(scheme) = scheme else { return Ok(Place::Folder(PathBuf::from(text))) };
        let provider = match scheme {
            "s3" | "s3a" => Provider::S3,
            "gs" => Provider::Gcs,
            "az" | "azure" => Provider::Azure,
            "memory" => return memory(text),
            "file" => return folder(text),
            "node" | "near" => return split(scheme == "near", text),
            _ => {
                let what = format!("no store is known for URLs with `{scheme}:`");
                let hint = "paths, and file:, s3:, gs: and az: URLs are";
                return Err(Error::new(Code::Usage, what).hint(hint));
            }
        };
        bucket(provider, text)
    }
}

fn split(near: bool, text: &str) -> Result<Place> {
    let wrong = |what: &str| {
        let hint = "node://PLACE/FOLDER, with `/`, `:` and `%` of PLACE as %2F, %3A and %25";
        Error::new(Code::Usage, what).hint(hint)
    };
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    let at = rest.find('/').ok_or_else(|| wrong("a place on a node without a folder"))?;
    let (whole, folder) = rest.split_at(at);
    let whole = decoded(whole).filter(|whole| !whole.is_empty());
    let whole = whole.ok_or_else(|| wrong("a place on a node without a place of all nodes"))?;
    match Place::parse(&whole)? {
        Place::Split { .. } => Err(wrong("a place of all nodes cannot be one on a node")),
        _ => Ok(Place::Split { whole, folder: PathBuf::from(folder), near }),
    }
}

/// Text with `%XX` as bytes; `None` where that is none, or not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// The URL of a folder of this node, with a place that all nodes share: see [`crate::SplitStore`]. `near`: the place of
/// all is whole, and the folder only nearer.
pub fn split_url(whole: &str, folder: &str, near: bool) -> String {
    let mut host = String::new();
    for char in whole.chars() {
        match char {
            '/' => host.push_str("%2F"),
            ':' => host.push_str("%3A"),
            '%' => host.push_str("%25"),
            char => host.push(char),
        }
    }
    let folder = folder.trim_start_matches('/');
    format!("{}://{host}/{folder}", if near { "near" } else { "node" })
}

fn memory(text: &str) -> Result<Place> {
    let rest = text.split_once(':').map_or("", |(_, rest)| rest).trim_start_matches("//");
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    if !prefix.is_empty() {
        check_key(prefix)?;
    }
    Ok(Place::Memory { name: name.to_owned(), prefix: prefix.to_owned() })
}

fn folder(text: &str) -> Result<Place> {
    let url = Url::parse(text).map_err(|error| no_url(&error))?;
    match url.to_file_path() {
        Ok(path) => Ok(Place::Folder(path)),
        Err(()) => Err(Error::new(Code::Usage, "a file: URL without a path on this machine")),
    }
}

fn bucket(provider: Provider, text: &str) -> Result<Place> {
    let url = Url::parse(text).map_err(|error| no_url(&error))?;
    if !url.username().is_empty() || url.password().is_some() {
        let what = "a URL of a store has a user or a password in it";
        return Err(Error::new(Code::Usage, what).hint("credentials come from the usual chain"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        let what = "a URL of a store has a query or a fragment";
        return Err(Error::new(Code::Usage, what).hint("settings go into the configuration"));
    }
    let bucket = url.host_str().unwrap_or_default().to_owned();
    if bucket.is_empty() {
        return Err(Error::new(Code::Usage, "a URL of a store without a bucket").at(text));
    }
    // Keys are text as it stands; only what `Url` encoded by itself is decoded again.
    let after = text.split_once("://").map_or("", |(_, rest)| rest);
    let prefix = after.split_once('/').map_or("", |(_, path)| path).trim_end_matches('/');
    if !prefix.is_empty() {
        check_key(prefix)?;
    }
    Ok(Place::Bucket { provider, bucket, prefix: prefix.to_owned() })
}

fn no_url(error: &url::ParseError) -> Error {
    Error::new(Code::Usage, format!("not a URL: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(bucket: &str, prefix: &str) -> Place {
        let (bucket, prefix) = (bucket.to_owned(), prefix.to_owned());
        Place::Bucket { provider: Provider::S3, bucket, prefix }
    }

    #[test]
    fn urls_and_paths_are_told_apart() {
        assert_eq!(Place::parse("s3://b").unwrap(), s3("b", ""));
        assert_eq!(Place::parse("s3://b/").unwrap(), s3("b", ""));
        assert_eq!(Place::parse("s3a://b/a b/ü/").unwrap(), s3("b", "a b/ü"));
        let memory = |name: &str, prefix: &str| {
            let (name, prefix) = (name.to_owned(), prefix.to_owned());
            Place::Memory { name, prefix }
        };
        assert_eq!(Place::parse("memory:").unwrap(), memory("", ""));
        assert_eq!(Place::parse("memory:x/a/b").unwrap(), memory("x", "a/b"));
        assert_eq!(Place::parse("memory://x/a/").unwrap(), memory("x", "a"));
        let path = |text: &str| Place::Folder(PathBuf::from(text));
        assert_eq!(Place::parse("/a/b").unwrap(), path("/a/b"));
        assert_eq!(Place::parse("run:7/x").unwrap(), path("run:7/x"));
        assert_eq!(Place::parse("file:///a%20b").unwrap(), path("/a b"));
        assert!(matches!(
            Place::parse("gs://b/p").unwrap(),
            Place::Bucket { provider: Provider::Gcs, .. }
        ));
    }

    #[test]
    fn what_is_no_store_is_refused() {
        for bad in ["ftp://b/x", "s3://", "s3:///x", "s3://b/x?y", "s3://u:p@b/x", "file://h/x"] {
            assert_eq!(Place::parse(bad).unwrap_err().code(), Code::Usage, "{bad}");
        }
        assert_eq!(Place::parse("s3://b/../x").unwrap_err().code(), Code::UnsafePath);
    }

    #[test]
    fn places_on_nodes_lead_back_to_both() {
        for whole in ["/lustre/me/run7", "s3://b/run 7%/x", "memory:x/a", "rel/run"] {
            for near in [false, true] {
                let url = split_url(whole, "/nvme/run 7%", near);
                let expected = Place::Split {
                    whole: whole.to_owned(),
                    folder: PathBuf::from("/nvme/run 7%"),
                    near,
                };
                assert_eq!(Place::parse(&url).unwrap(), expected, "{url}");
            }
        }
        let nested = split_url(&split_url("/a", "/b", false), "/c", false);
        for bad in ["node://", "node:///x", "node://a", "node://%2/x", "node://%ff/x", &nested] {
            assert_eq!(Place::parse(bad).unwrap_err().code(), Code::Usage, "{bad}");
        }
    }

    #[test]
    fn a_password_in_a_url_is_not_told() {
        let error = Place::parse("s3://user:hunter2@b/x").unwrap_err();
        assert!(!error.render().contains("hunter2"));
    }
}
