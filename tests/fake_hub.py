"""A Hub in memory with the calls of `huggingface_hub.HfApi` that this package makes."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import errors


def http_error(status, kind=errors.HfHubHTTPError):
    """What the client raises for an answer with this status."""
    request = SimpleNamespace(method="GET", url="http://hub", headers={})
    response = SimpleNamespace(status_code=status, headers={}, request=request, text="")
    return kind(f"{status} from the Hub", response=response)


class FakeHub:
    """Commits are dictionaries of files; `fail` lists errors that the next calls of a name raise."""

    def __init__(self, cache):
        self.cache, self.repos, self.calls, self.fail = Path(cache), {}, [], {}

    def _called(self, name):
        self.calls.append(name)
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    def _files(self, repo_id, revision):
        if repo_id not in self.repos:
            raise http_error(404, errors.RepositoryNotFoundError)
        repo = self.repos[repo_id]
        oid = repo["refs"].get(revision or "main", revision)
        if oid not in repo["commits"]:
            raise http_error(404, errors.RevisionNotFoundError)
        return oid, repo["commits"][oid]

    def put(self, repo_id, files, revision="main"):
        """A commit that somebody else made."""
        repo = self.repos.setdefault(repo_id, {"commits": {}, "refs": {}, "private": False})
        oid = hashlib.sha1(f"{len(repo['commits'])}{revision}".encode()).hexdigest()
        repo["commits"][oid] = dict(files)
        repo["refs"][revision] = oid
        return oid

    def create_repo(self, repo_id, *, private, exist_ok):
        self._called("create_repo")
        assert exist_ok
        if repo_id not in self.repos:
            self.put(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.repos[repo_id]["private"] = private

    def create_branch(self, repo_id, *, branch, exist_ok):
        self._called("create_branch")
        refs = self.repos[repo_id]["refs"]
        assert exist_ok
        refs.setdefault(branch, refs["main"])

    def create_tag(self, repo_id, *, tag, revision):
        self._called("create_tag")
        refs = self.repos[repo_id]["refs"]
        if tag in refs:
            raise http_error(409)
        refs[tag] = refs[revision or "main"]

    def model_info(self, repo_id, *, revision=None, files_metadata=False):
        self._called("model_info")
        oid, files = self._files(repo_id, revision)
        return SimpleNamespace(sha=oid, siblings=[self._sibling(*item, files_metadata) for item in files.items()])

    def _sibling(self, name, data, metadata):
        large = name.endswith(".safetensors")
        return SimpleNamespace(
            rfilename=name,
            blob_id=hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() if metadata else None,
            lfs=SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()) if metadata and large else None,
        )

    def create_commit(self, repo_id, operations, *, commit_message, revision, create_pr, parent_commit):
        self._called("create_commit")
        oid, files = self._files(repo_id, revision)
        if parent_commit != oid:
            raise http_error(412)
        new = files | {op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations}
        branch = "refs/pr/1" if create_pr else revision or "main"
        oid = self.put(repo_id, new, branch)
        url = f"http://hub/{repo_id}"
        return SimpleNamespace(
            oid=oid, commit_url=f"{url}/commit/{oid}", pr_url=f"{url}/discussions/1" if create_pr else None
        )

    def snapshot_download(self, repo_id, *, revision, allow_patterns):
        self._called("snapshot_download")
        oid, files = self._files(repo_id, revision)
        folder = self.cache / oid
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            if name in allow_patterns:
                (folder / name).write_bytes(data)
        return str(folder)
