//! Which bytes of a model are wanted: names by pattern, the part of one rank, parts of single tensors.

use std::collections::HashMap;
use std::str::FromStr;

use forebay_engine::Wanted;
use forebay_error::{Code, Error, Result};
use forebay_format::{Catalog, TensorEntry};
use forebay_tensor::Region;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::args::SelectArgs;

/// Names that an error lists as examples.
const EXAMPLES: usize = 3;

/// `DIM:RANK/WORLD`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardSpec {
    pub(crate) dim: usize,
    pub(crate) rank: u64,
    pub(crate) world: u64,
}

impl FromStr for ShardSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (dim, ranks) = text.split_once(':')?;
            let (rank, world) = ranks.split_once('/')?;
            let shard = Self {
                dim: dim.parse().ok()?,
                rank: rank.parse().ok()?,
                world: world.parse().ok()?,
            };
            Some(shard)
        };
        let shard = parse().ok_or("not of the form DIM:RANK/WORLD, such as 0:1/8")?;
        match shard.rank < shard.world {
            true => Ok(shard),
            false => Err(format!("ranks of {} count from 0 to less than that", shard.world)),
        }
    }
}

/// `NAME[a:b,c:d]`: of each side where it starts and ends, if that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedRegion {
    pub(crate) name: String,
    sides: Vec<(Option<u64>, Option<u64>)>,
}

impl FromStr for NamedRegion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || "not of the form NAME[a:b,c:d]".to_owned();
        let inner = text.strip_suffix(']').ok_or_else(form)?;
        // The last bracket: names may hold brackets too.
        let (name, inner) = inner.rsplit_once('[').ok_or_else(form)?;
        if name.is_empty() {
            return Err(form());
        }
        let sides = match inner.trim() {
            "" => Vec::new(),
            inner => inner.split(',').map(parse_side).collect::<Result<_, _>>()?,
        };
        Ok(Self { name: name.to_owned(), sides })
    }
}

/// `a:b`, either left out, or `a` alone for the one at `a`.
fn parse_side(text: &str) -> Result<(Option<u64>, Option<u64>), String> {
    let number = |text: &str| match text.trim() {
        "" => Ok(None),
        digits => digits
            .parse::<u64>()
            .map(Some)
            .map_err(|_| format!("`{digits}` is no index; they count from 0, without steps")),
    };
    match text.split_once(':') {
        Some((start, end)) => Ok((number(start)?, number(end)?)),
        None => match number(text)? {
            Some(at) => Ok((Some(at), Some(at.saturating_add(1)))),
            None => Err("a side is empty; `:` is all of it".to_owned()),
        },
    }
}

impl NamedRegion {
    /// The region in a tensor of this shape.
    fn resolve(&self, entry: &TensorEntry) -> Result<Region> {
        let bad =
            |what: String| Error::new(Code::BadSlice, what).at(format!("tensor {:?}", self.name));
        let dims = entry.shape.len();
        if self.sides.len() > dims {
            let what = format!("{} sides for a tensor of {dims} dimensions", self.sides.len());
            return Err(bad(what));
        }
        let mut region = Region::whole(&entry.shape);
        let places = region.offsets.iter_mut().zip(&mut region.sizes);
        for ((offset, size), &(start, end)) in places.zip(&self.sides) {
            let start = start.unwrap_or(0);
            let end = end.unwrap_or(*size);
            if start > end || end > *size {
                return Err(bad(format!("{start}:{end} leaves the shape {:?}", entry.shape)));
            }
            (*offset, *size) = (start, end - start);
        }
        Ok(region)
    }
}

/// What to load, and what is worth telling about the choice.
pub(crate) struct Choice {
    pub(crate) wanted: Vec<Wanted>,
    /// Tensors that `--shard` left whole because they lack the dimension.
    pub(crate) unsharded: usize,
}

/// Applies the flags to a catalog.
///
/// Errors: `no_such_tensor` when a pattern or a name finds nothing; `bad_slice`; `usage` for a bad pattern.
pub(crate) fn choose(catalog: &Catalog, args: &SelectArgs) -> Result<Choice> {
    let mut regions = HashMap::new();
    for named in &args.region {
        let index = catalog.find(&named.name).ok_or_else(|| unknown(catalog, &named.name))?;
        let region = catalog.tensors.get(index).map(|entry| named.resolve(entry)).transpose()?;
        if regions.insert(index, region).is_some() {
            let what = format!("two regions of tensor {:?}", named.name);
            return Err(Error::new(Code::Usage, what).hint("load them one after the other"));
        }
    }
    let named = match args.names.is_empty() {
        // Regions alone: only those.
        true if !regions.is_empty() => Vec::new(),
        true => (0..catalog.tensors.len()).collect(),
        false => matching(catalog, &args.names)?,
    };
    let whole = named.into_iter().filter(|index| !regions.contains_key(index));
    let mut wanted: Vec<Wanted> = whole.map(|tensor| Wanted { tensor, region: None }).collect();
    let mut unsharded = 0;
    if let Some(shard) = args.shard {
        for want in &mut wanted {
            let Some(entry) = catalog.tensors.get(want.tensor) else { continue };
            if shard.dim >= entry.shape.len() {
                unsharded += 1;
                continue;
            }
            want.region = Some(Region::shard(&entry.shape, shard.dim, shard.rank, shard.world)?);
        }
    }
    wanted.extend(regions.into_iter().map(|(tensor, region)| Wanted { tensor, region }));
    for want in &mut wanted {
        let shape = catalog.tensors.get(want.tensor).map(|entry| entry.shape.as_slice());
        // A region that is all of it needs no slicing.
        if want.region.as_ref().zip(shape).is_some_and(|(region, shape)| region.is_whole(shape)) {
            want.region = None;
        }
    }
    Ok(Choice { wanted, unsharded })
}

/// Places of the tensors that any of the patterns matches, each of which must match one.
pub(crate) fn matching(catalog: &Catalog, patterns: &[String]) -> Result<Vec<usize>> {
    let set = compile(patterns)?;
    let mut used = vec![false; patterns.len()];
    let mut found = Vec::new();
    for (index, entry) in catalog.tensors.iter().enumerate() {
        let hits = set.matches(&entry.name);
        if !hits.is_empty() {
            found.push(index);
        }
        for hit in hits {
            if let Some(used) = used.get_mut(hit) {
                *used = true;
            }
        }
    }
    match patterns.iter().zip(&used).find(|(_, used)| !**used) {
        Some((pattern, _)) => Err(unknown(catalog, pattern)),
        None => Ok(found),
    }
}

/// One matcher of all the patterns.
pub(crate) fn compile(patterns: &[String]) -> Result<GlobSet> {
    let bad = |error: globset::Error| {
        Error::new(Code::Usage, "the pattern is not understood")
            .with_source(error)
            .hint("a bracket in a name is written [[]")
    };
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern).literal_separator(false).build().map_err(bad)?);
    }
    set.build().map_err(bad)
}

fn unknown(catalog: &Catalog, pattern: &str) -> Error {
    let error =
        Error::new(Code::NoSuchTensor, format!("no tensor is called or matches {pattern:?}"));
    let names: Vec<String> = catalog
        .by_name()
        .take(EXAMPLES)
        .filter_map(|index| catalog.tensors.get(index))
        .map(|entry| format!("{:?}", entry.name))
        .collect();
    match names.is_empty() {
        true => error.hint("the model holds no tensors"),
        false => error.hint(format!(
            "the model holds {} such as {}; `forebay inspect` lists all",
            crate::units::count(catalog.tensors.len(), "tensor"),
            names.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::{Format, Stored};
    use forebay_tensor::Dtype;

    fn catalog() -> Catalog {
        let entry = |name: &str, shape: &[u64], offset| TensorEntry {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            file: 0,
            offset,
            bytes: shape.iter().product(),
            stored: Stored::Run,
        };
        let tensors =
            vec![entry("a.w", &[4, 6], 0), entry("a.b", &[4], 24), entry("c[0]", &[], 28)];
        Catalog::new(Format::Safetensors, None, Vec::new(), tensors, Vec::new()).unwrap()
    }

    fn args() -> SelectArgs {
        SelectArgs { names: Vec::new(), shard: None, region: Vec::new() }
    }

    fn chosen(args: &SelectArgs) -> Vec<(usize, Option<String>)> {
        let mut wanted = choose(&catalog(), args).unwrap().wanted;
        wanted.sort_by_key(|want| want.tensor);
        let show = |want: Wanted| (want.tensor, want.region.map(|region| region.to_string()));
        wanted.into_iter().map(show).collect()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn patterns_pick_and_must_hit() {
        assert_eq!(chosen(&args()).len(), 3);
        let picked = chosen(&SelectArgs { names: names(&["*.w", "c[[]0]"]), ..args() });
        assert_eq!(picked, [(0, None), (2, None)]);
        let missed = SelectArgs { names: names(&["a.*", "x*"]), ..args() };
        assert_eq!(choose(&catalog(), &missed).err().unwrap().code(), Code::NoSuchTensor);
        let bad = SelectArgs { names: names(&["a["]), ..args() };
        assert_eq!(choose(&catalog(), &bad).err().unwrap().code(), Code::Usage);
    }

    #[test]
    fn shards_cut_what_has_the_dimension() {
        let shard = Some("1:1/2".parse().unwrap());
        let choice = choose(&catalog(), &SelectArgs { shard, ..args() }).unwrap();
        assert_eq!(choice.unsharded, 2);
        let picked = chosen(&SelectArgs { shard, ..args() });
        assert_eq!(picked, [(0, Some("[0:4, 3:6]".to_owned())), (1, None), (2, None)]);
        for bad in ["", "0", "0:1", "0:2/2", "0:-1/2", "x:0/1", "0:0/0"] {
            assert!(bad.parse::<ShardSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn regions_are_python_slices_without_tricks() {
        let region = |text: &str| vec![text.parse::<NamedRegion>().unwrap()];
        let picked = |text: &str| chosen(&SelectArgs { region: region(text), ..args() });
        assert_eq!(picked("a.w[1:3,:]"), [(0, Some("[1:3, 0:6]".to_owned()))]);
        assert_eq!(picked("a.w[2]"), [(0, Some("[2:3, 0:6]".to_owned()))]);
        assert_eq!(picked("a.w[:,4:]"), [(0, Some("[0:4, 4:6]".to_owned()))]);
        assert_eq!(picked("a.w[:]"), [(0, None)]);
        assert_eq!(picked("c[0][]"), [(2, None)]);
        let both = SelectArgs { names: names(&["a.*"]), region: region("a.w[0]"), ..args() };
        assert_eq!(chosen(&both), [(0, Some("[0:1, 0:6]".to_owned())), (1, None)]);
        for bad in ["a.w[5]", "a.w[0:5]", "a.w[3:2]", "a.b[0,0]"] {
            let bad = SelectArgs { region: region(bad), ..args() };
            assert_eq!(choose(&catalog(), &bad).err().unwrap().code(), Code::BadSlice);
        }
        for bad in ["a", "[0]", "a[1:2:3]", "a[-1]", "a[,]", "a[0"] {
            assert!(bad.parse::<NamedRegion>().is_err(), "{bad}");
        }
    }
}
